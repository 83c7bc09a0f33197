"""The options of `empo2 serve`, checked before anything is loaded; no JAX here, the command line imports it."""

import argparse
import ipaddress
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from empo2_jax.config_options import at_least
from empo2_jax.errors import ConfigError

KEY_VARIABLE, DTYPES = "EMPO2_API_KEY", ("float32", "bfloat16")


def _option(default: Any, kind: type, metavar: str, text: str, least: int | None = None) -> Any:
    """A field that is an option: its type, how the help shows it, and its least value."""
    said = text if "default" in text else f"{text} (default: {default})"
    return field(default=default, metadata={"least": least, "type": kind, "metavar": metavar, "help": said})


@dataclass(frozen=True)
class ServeOptions:
    """How a model folder is served; every field is an option of the command line, with _ for - and without `_s`."""

    folder: Path
    port: int  # 0 = any free one
    host: str = _option("127.0.0.1", str, "ADDRESS", "(default: 127.0.0.1, this machine only)")
    dtype: str | None = _option(None, str, "|".join(DTYPES), "of compute and cache (default: the checkpoint's)")
    slots: int = _option(16, int, "N", "requests at a time", 1)
    max_length: int | None = _option(
        None, int, "N", "prompt + new tokens (default: the model's positions, at most 4096)", 2
    )
    api_key: str | None = _option(None, str, "KEY", f"asked of every client (default: ${KEY_VARIABLE}, or none)")
    weight_version: str = _option("default", str, "TEXT", "label of the first weights (default: default)")
    burst: int = _option(16, int, "N", "tokens before others can join", 1)
    max_waiting: int = _option(512, int, "N", "more are refused", 0)
    max_body_mb: int = _option(32, int, "N", "largest request", 1)
    grace_s: float = _option(30.0, float, "S", "seconds to finish at the end", 0)
    data: int = _option(1, int, "N", "devices that share the slots", 1)
    tensor: int = _option(1, int, "N", "devices that share the weights", 1)

    def __post_init__(self) -> None:
        for one in fields(self):
            if "least" in one.metadata and one.metadata["least"] is not None:
                at_least(_flag(one.name), vars(self)[one.name], one.metadata["least"])
        if self.dtype not in (None, *DTYPES):
            raise ConfigError(f"--dtype {self.dtype}: {' or '.join(DTYPES)} is allowed")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: 0 (any free one) to 65535 are allowed")
        if self.slots % self.data:
            raise ConfigError(f"--slots {self.slots}: a multiple of --data {self.data} is allowed")
        if not self.api_key and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} is reachable from other machines: --api-key (or {KEY_VARIABLE}) is needed"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _flag(name: str) -> str:
    return f"--{name.removesuffix('_s').replace('_', '-')}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument("folder", type=Path, metavar="MODEL_DIR", help="Hugging Face folder")
    parser.add_argument("--port", type=int, required=True, metavar="P", help="0 = any free one, which is printed")
    for one in fields(ServeOptions):
        shown = {key: value for key, value in one.metadata.items() if key != "least"}
        if shown:
            parser.add_argument(_flag(one.name), dest=one.name, default=one.default, **shown)


def parse_options(options: argparse.Namespace) -> ServeOptions:
    """The checked options; the key may come from the environment, where no process list shows it."""
    values: dict[str, Any] = {one.name: vars(options)[one.name] for one in fields(ServeOptions)}
    values["api_key"] = values["api_key"] or os.environ.get(KEY_VARIABLE)
    return ServeOptions(**values)
