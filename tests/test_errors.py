"""What pydantic finds, in the words of this package: what, where, what is allowed."""

import errno
from typing import Any, Literal

import jax
import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from empo2_jax.errors import ConfigError, in_one_line, short, wrong_value


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    count: int = Field(1, ge=1, lt=9)
    share: float = Field(0.5, gt=0, le=1)
    kind: Literal["a", "b"] = "a"
    pair: tuple[int, int] = Field((1, 2), strict=False)
    names: list[str] = Field(["x"], min_length=1)
    needed: str

    @field_validator("needed")
    @classmethod
    def _braces(cls, value: str) -> str:
        if "{" in value:
            raise ValueError("{ is not allowed")
        return value


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"count": 2.5}, "count = 2.5: a whole number is allowed"),
        ({"count": 0}, "count = 0: at least 1 is allowed"),
        ({"count": 9}, "count = 9: less than 9 is allowed"),
        ({"share": 0}, "share = 0: more than 0.0 is allowed"),
        ({"share": float("nan")}, "share = nan: a finite number is allowed"),
        ({"kind": "c"}, "kind = 'c': 'a' or 'b' is allowed"),
        ({"pair": [1]}, "pair = [1]: more than 1 values are needed"),
        ({"pair": [1, "2"]}, "pair[1] = '2': a whole number is allowed"),
        ({"names": []}, "names = []: a length of at least 1 is allowed"),
        ({"names": "x" * 99}, f"names = '{'x' * 56}...: a list is allowed"),
        ({"nmaes": []}, "unknown key `nmaes`"),
        ({"needed": "{x}"}, "needed = '{x}': { is not allowed"),
    ],
)
def test_a_problem_says_what_where_and_what_is_allowed(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Record.model_validate({"needed": "here", **values})
    assert wrong_value(caught.value.errors()[0]) == said


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValidationError) as caught:
        Record.model_validate({})
    assert wrong_value(caught.value.errors()[0]) == "needed is missing"
    with pytest.raises(ValidationError) as caught:
        Record.model_validate([])
    assert wrong_value(caught.value.errors()[0]) == "the record = []: a table of keys and values is allowed"


def test_a_value_is_shown_in_sixty_characters() -> None:
    assert short("x" * 58) == f"'{'x' * 58}'"
    assert short("x" * 59) == f"'{'x' * 56}..."


XLA, ADVICE = (
    jax.errors.JaxRuntimeError,
    "`empo2 plan` says what takes how much, see docs/troubleshooting.md#out-of-memory",
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("two\n  lines"), "two lines"),
        (FileNotFoundError(errno.ENOENT, "No such file", "here"), "here: No such file"),
        (OSError("reset"), "reset"),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "the host is out of memory: [Errno 12] Cannot allocate memory",
        ),
        (OSError("\n first\nsecond"), "first second"),
        (ConnectionResetError(), "ConnectionResetError"),
        (MemoryError(), "the host is out of memory"),
        (MemoryError("Unable to allocate 8.00 PiB"), "the host is out of memory: Unable to allocate 8.00 PiB"),
        (
            XLA("RESOURCE_EXHAUSTED: Out of memory.\nPeak:"),
            "the device is out of memory: RESOURCE_EXHAUSTED: Out of memory",
        ),
        (XLA("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY"), "the device is out of memory: INTERNAL: CUDA_ERROR_OUT_OF_MEMORY"),
        (XLA("Ran out of memory in space hbm"), "the device is out of memory: Ran out of memory in space hbm"),
        (
            XLA("RESOURCE_EXHAUSTED: Failed to allocate request for 2.0GiB"),
            "the device is out of memory: RESOURCE_EXHAUSTED: Failed to allocate request for 2.0GiB",
        ),
        (XLA("\n \n  Out of memory. \nPeak:"), "the device is out of memory: Out of memory"),
        (MemoryError(" \n"), "the host is out of memory"),
        (XLA("RESOURCE_EXHAUSTED: Received message larger than max (5 vs. 4)"), None),  # of gRPC
        (XLA("INTERNAL: a bug"), None),
        (RecursionError("out of memory"), None),
    ],
)
def test_what_is_no_bug_is_one_line(error: Any, line: str | None) -> None:
    advice = f"; {ADVICE}" if line and "memory" in line else ""
    assert in_one_line(error) == (None if line is None else line + advice)


def test_the_innermost_place_in_the_package_is_named() -> None:
    with pytest.raises(MemoryError) as caught:
        wrong_value({"type": "missing", "input": None, "loc": _Exhausted(), "msg": "", "ctx": {}, "url": ""})
    assert in_one_line(caught.value) == f"the host is out of memory in errors.py (wrong_value); {ADVICE}"


class _Exhausted(tuple[int | str, ...]):
    def __bool__(self) -> bool:
        raise MemoryError
