"""Whatever a file holds: the value of the shape, or one error that names file and key."""

from pathlib import Path
from typing import Annotated, Any, NotRequired

import pytest
from pydantic import BaseModel, Field, with_config
from typing_extensions import TypedDict

from empo2_jax.errors import CheckpointError, ConfigError, DataError
from empo2_jax.readers import RECORD, Whole, parse_json, read_json, read_text, read_toml


@with_config(RECORD)
class Line(TypedDict):
    name: str
    count: NotRequired[Whole]
    scores: NotRequired[Annotated[list[float], Field(min_length=1)]]


class Model(BaseModel):
    size: int = Field(ge=1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON: EOF while parsing a value at line 1 column 0"),
        (b'{"name": "\xff"}', "not JSON: invalid unicode code point at line 1 column 11"),
        (b'{"name": "\\ud800"}', "not JSON: "),
        (b"[" * 100_000, "not JSON: recursion limit exceeded at line 1 column 202"),
        (b'{"count": ' + b"9" * 5_000 + b"}", "not JSON: number out of range"),
        (b"[1]", "the record = [1]: a table of keys and values is allowed"),
        (b"{}", "name is missing"),
        (b'{"name": 5}', "name = 5: text is allowed"),
        (b'{"name": null}', "name = None: text is allowed"),
        (b'{"name": "a", "count": true}', "count = True: a whole number is allowed"),
        (b'{"name": "a", "count": -1}', "count = -1: at least 0 is allowed"),
        (b'{"name": "a", "count": 1' + b"0" * 30 + b"}", "at most 9007199254740992 is allowed"),
        (b'{"name": "a", "scores": []}', "scores = []: a length of at least 1 is allowed"),
        (b'{"name": "a", "scores": [1, "2"]}', "scores[1] = '2': a number is allowed"),
        (b'{"name": "a", "scores": [NaN]}', "scores[0] = nan: a finite number is allowed"),
        (b'{"name": "a", "scores": [1e999]}', "scores[0] = inf: a finite number is allowed"),
    ],
)
def test_what_is_no_value_of_the_shape_is_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_json(path, Line, CheckpointError)
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_record_keeps_what_its_shape_does_not_name_and_a_model_takes_what_it_knows() -> None:
    assert parse_json('{"name": "a", "scores": [1, 0.1], "more": null}', Line, "x") == {
        "name": "a",
        "scores": [1.0, 0.1],
        "more": None,
    }
    assert parse_json(b'{"size": 3, "more": 1}', Model, "x") == Model(size=3)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"^{tmp_path}/none: cannot be read: No such file or directory$"):
        read_json(tmp_path / "none", dict[str, Any])
    with pytest.raises(DataError, match=rf"^{tmp_path}: cannot be read: Is a directory$"):
        read_text(tmp_path)
    (tmp_path / "x").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=rf"^{tmp_path}/x: not UTF-8: invalid start byte at byte 2$"):
        read_text(tmp_path / "x")


@pytest.mark.parametrize("content", [b"a = ", b"a = " + b"[" * 9_000, b"a = " + b"9" * 5_000, b"a = '\xff'"])
def test_files_that_are_no_toml_are_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{path}: not ") as caught:
        read_toml(path)
    assert "\n" not in str(caught.value)
