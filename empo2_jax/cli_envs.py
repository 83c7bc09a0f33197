"""`empo2 play` and `empo2 envs check`: options and output. What they do is in `play` and `envs/check`."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_origin

from rich.console import Console
from rich.table import Table

from empo2_jax import shop
from empo2_jax.config import Config, EnvConfig, parse_config
from empo2_jax.config_file import load_config
from empo2_jax.config_options import at_least, names
from empo2_jax.errors import ConfigError


def add_commands(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add both commands; `command` makes one from the group, a name, a function and a text."""
    play = command(commands, "play", _play, "play an environment by hand, or replay a recorded episode")
    play.add_argument("name", nargs="?", default="", metavar="NAME", help="environment, for example scienceworld")
    play.add_argument("--task", default="", metavar="T", help="task (default: the first one)")
    play.add_argument("--variation", type=int, metavar="V", help="its variation (default: the first one to train on)")
    play.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the world (default: 0)")
    play.add_argument("--replay", type=Path, metavar="FILE", help="RUN/episodes/<iteration>.jsonl to replay instead")
    play.add_argument("--id", default="", metavar="ID", help="episode of that file (default: its first)")
    play.add_argument("--web", action="store_true", help="webshop: on a local page; its address is printed")
    play.add_argument("--port", type=int, default=0, metavar="N", help="of the page (default: a free one)")
    _env_options(play)

    envs = command(commands, "envs", None, "the environments").add_subparsers(required=True, metavar="COMMAND")
    check = command(envs, "check", _check, "replay known solutions; exit 1 if something is off")
    check.add_argument("name", metavar="NAME", help="environment, for example scienceworld")
    check.add_argument("--tasks", metavar="A,B", help="tasks (default: as configured)")
    check.add_argument("--processes", type=int, default=2, metavar="N", help="processes that must agree (default: 2)")
    check.add_argument("--package", action="store_true", help="compare every score with the world's own package too")
    _env_options(check)


def _env_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="take [env] from this configuration")
    group = parser.add_argument_group("[env]", (EnvConfig.__doc__ or "").splitlines()[0])
    for key, field in EnvConfig.model_fields.items():
        if key not in ("name", "tasks"):
            group.add_argument(f"--env.{key}", dest=f"env.{key}", metavar="VALUE", help=field.description)


def _env_config(options: argparse.Namespace, name: str, tasks: Sequence[str], base: Config | None = None) -> EnvConfig:
    """`[env]` of the configuration file or of `base`, with the options on top."""
    config = base or (load_config(options.config) if options.config else Config())
    values: dict[str, Any] = config.env.model_dump() | ({"name": name} if name else {})
    values |= {"tasks": tuple(tasks)} if tasks else {}
    for key, field in EnvConfig.model_fields.items():
        text = getattr(options, f"env.{key}", None)
        if text is not None:
            as_text = field.annotation is str or (get_origin(field.annotation) is not None and not text.isdigit())
            values[key] = text if as_text else _number(key, text)
    return parse_config({"env": values}, "options").env


def _number(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"--env.{key} {text}: a number, true or false is expected") from None


def _play(options: argparse.Namespace) -> int:
    from empo2_jax import play
    from empo2_jax.envs.registry import make_family

    if options.replay is not None:
        base = play.config_beside(options.replay)
        family = make_family(_env_config(options, options.name, [], base))
        try:
            return 0 if play.replay(family, options.replay, options.id, base.run.seed, print) else 1
        finally:
            family.close()
    if not options.name and options.config is None:
        raise ConfigError("play needs NAME, --config or --replay")
    config = _env_config(options, options.name, [options.task] if options.task else [])
    if options.web:
        if config.name != "webshop":
            raise ConfigError(f"--web: {config.name} has no page; webshop has one")
        shop.serve(config, options.variation, options.port)
        return 0
    family = make_family(config)
    try:
        tasks = family.tasks("train")
        task = tasks[0] if options.variation is None else family.task(tasks[0].name, options.variation)
        play.play(family, task, options.seed, config.step_limit, input, print)
    finally:
        family.close()
    return 0


def _check(options: argparse.Namespace) -> int:
    from empo2_jax.envs.check import check
    from empo2_jax.progress import note

    at_least("--processes", options.processes, 1)
    config = _env_config(options, options.name, names("--tasks", options.tasks))
    note(f"replaying known solutions of {options.name} in {options.processes} processes")
    report = check(config, options.processes, options.package)
    console = Console()
    for line in report.notes:
        console.print(line, markup=False)
    table = Table(title=f"known solutions in {options.processes} processes")
    table.add_column("problem", overflow="fold")
    compared = ["package's scores"] * options.package
    heads = ["solution", "score", "same transcript", *compared, "ms per step", ""]
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in report.rows:
        told = [f"{row.actions} actions", f"{row.score:g}", row.same, *[row.package] * options.package]
        table.add_row(row.task, *told, f"{row.step_ms:.1f}", row.problem or "good")
    console.print(table)
    return 0 if report.good else 1
