"""The options of `empo2 serve`, checked before anything is loaded; no JAX here, the command line imports it."""

import argparse
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from empo2_jax.errors import ConfigError

KEY_VARIABLE = "EMPO2_API_KEY"


@dataclass(frozen=True)
class ServeOptions:
    """How a model folder is served."""

    folder: Path
    host: str
    port: int  # 0 = any free one
    dtype: str | None  # None = the checkpoint's
    slots: int
    max_length: int | None  # prompt + new tokens; None = the model's positions, at most 4096
    api_key: str | None
    weight_version: str
    burst: int  # tokens
    max_waiting: int  # requests
    max_body_mb: int
    grace_s: float
    data: int  # devices that share the slots
    tensor: int  # devices that share every weight

    def __post_init__(self) -> None:
        for name, value, least in (
            ("slots", self.slots, 1),
            ("max-length", self.max_length if self.max_length is not None else 2, 2),
            ("burst", self.burst, 1),
            ("max-waiting", self.max_waiting, 0),
            ("max-body-mb", self.max_body_mb, 1),
            ("grace", self.grace_s, 0),
            ("data", self.data, 1),
            ("tensor", self.tensor, 1),
        ):
            if value < least:
                raise ConfigError(f"--{name} {value}: at least {least} is allowed")
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument("folder", type=Path, metavar="MODEL_DIR", help="Hugging Face folder")
    parser.add_argument("--port", type=int, required=True, metavar="P", help="0 = any free one, which is printed")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="(default: 127.0.0.1, this machine only)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of compute and cache (default: the checkpoint's)"
    )
    parser.add_argument("--slots", type=int, default=16, metavar="N", help="requests at a time (default: 16)")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="prompt + new tokens (default: the model's positions, at most 4096)"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"asked of every client (default: ${KEY_VARIABLE}, or none)")
    parser.add_argument("--weight-version", default="default", metavar="TEXT", help="label of the first weights")
    parser.add_argument(
        "--burst", type=int, default=16, metavar="N", help="tokens before others can join (default: 16)"
    )
    parser.add_argument("--max-waiting", type=int, default=512, metavar="N", help="more are refused (default: 512)")
    parser.add_argument("--max-body-mb", type=int, default=32, metavar="N", help="largest request (default: 32)")
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="S", help="seconds to finish at the end (default: 30)"
    )
    parser.add_argument("--data", type=int, default=1, metavar="N", help="devices that share the slots (default: 1)")
    parser.add_argument(
        "--tensor", type=int, default=1, metavar="N", help="devices that share the weights (default: 1)"
    )


def parse_options(options: argparse.Namespace) -> ServeOptions:
    """The checked options; the key may come from the environment, where no process list shows it."""
    return ServeOptions(
        folder=options.folder,
        host=options.host,
        port=options.port,
        dtype=options.dtype,
        slots=options.slots,
        max_length=options.max_length,
        api_key=options.api_key or os.environ.get(KEY_VARIABLE),
        weight_version=options.weight_version,
        burst=options.burst,
        max_waiting=options.max_waiting,
        max_body_mb=options.max_body_mb,
        grace_s=options.grace,
        data=options.data,
        tensor=options.tensor,
    )
