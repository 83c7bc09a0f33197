"""The commands around WebShop: check a data folder, make a synthetic one, shop by hand in a browser."""

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from empo2_jax.config import EnvConfig
from empo2_jax.errors import ConfigError

GOALS = 500  # test goals that the page walks through

AddCommand = Callable[[Any, str, Callable[[argparse.Namespace], int] | None, str], Any]


def add_commands(commands: Any, add: AddCommand) -> None:
    """Put `webshop check` and `webshop make` among the commands."""
    shop = add(commands, "webshop", None, "WebShop's data").add_subparsers(required=True, metavar="COMMAND")
    checker = add(shop, "check", _check, "check a downloaded data folder and say what is missing")
    checker.add_argument("data", type=Path, metavar="DIR", help="folder of the data, or one product file in it")
    maker = add(shop, "make", _make, "write a synthetic data folder in the format of the real one")
    maker.add_argument("folder", type=Path, metavar="DIR", help="new folder")
    maker.add_argument("--products", type=int, default=400, metavar="N", help="(default: 400)")
    maker.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")


def _check(options: argparse.Namespace) -> int:
    from empo2_jax.envs.webshop.check import check

    findings = check(options.data)
    table = Table("check", "found", "", title=str(options.data))
    for finding in findings:
        table.add_row(finding.name, finding.found, "good" if finding.ok else "WRONG")
    Console(markup=False).print(table)
    wrong = [finding for finding in findings if not finding.ok]
    for finding in wrong:
        print(f"error: {options.data}: {finding.name}: {finding.found}", file=sys.stderr)
    return 1 if wrong else 0


def _make(options: argparse.Namespace) -> int:
    from empo2_jax.envs.webshop.synthetic import make

    make(options.folder, options.products, options.seed)
    print(options.folder)
    return 0


def serve(config: EnvConfig, variation: int | None, port: int) -> None:
    """Serve the page until Ctrl-C: one session per visit, beginning with a goal and going on with the test goals.

    Args:
        config: The section `[env]`.
        variation: Position of the first goal; None for the first test goal.
        port: Of the page; 0 for one from the operating system.
    """
    from empo2_jax.envs import webshop
    from empo2_jax.envs.webshop.web import ShopServer

    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port}: 0 to {(1 << 16) - 1} is allowed")
    family = webshop.from_config(config, panel=GOALS, workers=1)
    tasks = family.tasks("test")
    if variation is not None:
        tasks = [family.task(tasks[0].name, variation), *tasks]
    with ShopServer(family, tasks, port) as server, suppress(KeyboardInterrupt):
        print(f"shop at {server.url} (Ctrl-C ends)", flush=True)
        server.serve_forever()
