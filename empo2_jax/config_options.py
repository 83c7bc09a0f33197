"""Every key of the configuration as a command-line option `--section.key VALUE`, and the configuration they give.

Commands check the numbers of their other options with `at_least`.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from empo2_jax.config import Config
from empo2_jax.config_base import LARGEST
from empo2_jax.config_file import load_config
from empo2_jax.errors import ConfigError


def config_options(parser: argparse.ArgumentParser, count: str | None = None) -> None:
    """CONFIG and one option per key of the configuration."""
    parser.usage = "%(prog)s CONFIG [--section.key VALUE ...] [option ...]"
    text = "TOML file; the options below override its keys"
    parser.add_argument("config", nargs=count, type=Path, metavar="CONFIG", help=text)
    for name, section in Config.model_fields.items():
        model: Any = section.annotation
        group = parser.add_argument_group(f"[{name}]", (model.__doc__ or "").splitlines()[0])
        for key, field in model.model_fields.items():
            default = field.default if field.default != "" else '""'
            text = f"{field.description} (default: {list(default) if isinstance(default, tuple) else default})"
            option, kind = f"{name}.{key}", _type_name(field.annotation)
            group.add_argument(f"--{option}", dest=option, metavar=kind, help=text.replace("%", "%%"))


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if get_origin(annotation) is tuple:
        return "LIST"
    names: dict[type, str] = {int: "INT", float: "FLOAT", bool: "true|false", str: "TEXT"}
    return names[_plain_type(annotation)]


def _plain_type(annotation: Any) -> type:
    return annotation if isinstance(annotation, type) else get_args(annotation)[0]


def config_of(options: argparse.Namespace) -> Config:
    """The configuration that the parsed options name, validated; raises `ConfigError`."""
    overrides = []
    for name, section in Config.model_fields.items():
        model: Any = section.annotation
        for key, field in model.model_fields.items():
            text = getattr(options, f"{name}.{key}")
            if text is not None:
                overrides.append(f"{name}.{key}={_toml_text(text, field)}")
    return load_config(options.config, overrides)


def _toml_text(text: str, field: FieldInfo) -> str:
    """The option's text in TOML syntax: quotes around text, brackets around a comma-separated list."""
    kind = _type_name(field.annotation)
    if kind == "LIST" and not text.startswith("["):
        numbers = int in map(_plain_type, get_args(field.annotation)[:1])
        items = [item.strip() for item in text.split(",") if item.strip()]
        return f"[{', '.join(items if numbers else [json.dumps(item, ensure_ascii=False) for item in items])}]"
    if kind in ("LIST", "INT", "FLOAT", "true|false"):
        return text
    return json.dumps(text, ensure_ascii=False)


def at_least(option: str, value: int | float | None, least: int | float) -> None:
    """Raise `ConfigError` if an option was given (not None) and its number is too small, or too large for anything."""
    if value is not None and not least <= value <= LARGEST:
        said = f"at least {least}" if value < least else f"a number up to {LARGEST}"
        raise ConfigError(f"{option} {value}: {said} is allowed")


def names(option: str, text: str | None) -> tuple[str, ...]:
    """The names in an option's A,B; () where it was not given; raises `ConfigError` if it was and has none."""
    found = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    if text is not None and not found:
        raise ConfigError(f"{option} {text!r}: names are allowed, A,B")
    return found
