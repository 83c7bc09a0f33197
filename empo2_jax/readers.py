"""Files that anybody may have written or damaged, as values that are what they should be.

Text, JSON and TOML are parsed here, and checked against a shape: any type that pydantic knows, of which the value then
is. Whatever a file holds (bytes that are no UTF-8, a list in place of an object, numbers or nesting without end), what
cannot be used ends in one error of `errors.py` that names the file and, where there is one, the key.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from empo2_jax.errors import ConfigError, DataError, Empo2Error, wrong_value

# Of shapes that are a `TypedDict` (with `pydantic.with_config`): keys that they do not name stay as they are.
RECORD = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
Whole = Annotated[int, Field(ge=0, le=2**53)]  # counts and places
Kind = type[Empo2Error]


def read_bytes(path: Path, kind: Kind = DataError) -> bytes:
    """All of a file; raises `kind` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror}") from None


def read_text(path: Path, kind: Kind = DataError) -> str:
    """The text of a file in UTF-8; raises `kind` if it is none."""
    try:
        return read_bytes(path, kind).decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None


def read_json(path: Path, shape: Any, kind: Kind = DataError) -> Any:
    """The JSON value in a file, which is of `shape`; raises `kind` if it is not."""
    return parse_json(read_bytes(path, kind), shape, str(path), kind)


def parse_json(content: bytes | str, shape: Any, where: str, kind: Kind = DataError) -> Any:
    """A JSON value of `shape`; raises `kind`, which begins with `where`, if it is none."""
    try:
        value = from_json(content)
    except ValueError as error:
        raise kind(f"{where}: not JSON: {error}") from None
    return shaped(value, shape, where, kind)


def read_toml(path: Path, kind: Kind = ConfigError) -> dict[str, Any]:
    """The table in a TOML file; raises `kind` if it is none."""
    try:
        return tomllib.loads(read_text(path, kind))
    except (ValueError, RecursionError) as error:  # the parser's own, of numbers without end and of deep nesting
        raise kind(f"{path}: not valid TOML: {error}") from None


def shaped(value: Any, shape: Any, where: str, kind: Kind = DataError) -> Any:
    """`value` as an instance of `shape`; raises `kind` with `where` and the first key that is something else."""
    try:
        return _adapter(shape).validate_python(value)
    except ValidationError as error:
        raise kind(f"{where}: {wrong_value(error.errors(include_url=False)[0])}") from None


@cache
def _adapter(shape: Any) -> Any:
    return TypeAdapter(shape)
