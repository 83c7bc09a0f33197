"""A memory's dump in numbers, computed by hand."""

import json

import pytest

from empo2_jax.errors import CheckpointError
from empo2_jax.report.memory_content import BEST, Buffer, Content, read_content
from tests.fixtures.recorded import tip


def lines(*entries: dict) -> list[bytes]:
    return [json.dumps(entry).encode() + b"\n" for entry in entries]


def test_buffers_are_summed_and_the_best_entries_kept() -> None:
    found = read_content(
        lines(
            tip("a", -5.0, counter=0, iteration=4),
            tip("b", 20.0, counter=1, iteration=2, buffer="other"),
            tip("c", 30.0, counter=2, iteration=9),
            tip("d", 20.0, counter=3, iteration=9),
        )
    )
    assert found.buffers == {"toy/lamp/0": Buffer(3, 45.0, 30.0, 4, 9), "other": Buffer(1, 20.0, 20.0, 2, 2)}
    assert [entry["content"] for entry in found.best] == ["c", "d", "b", "a"]
    assert found.entries == 4 and read_content([]) == Content() and Content().entries == 0


def test_only_the_best_of_many_are_kept_and_a_damaged_line_is_an_error() -> None:
    many = lines(*(tip(str(n), float(n % 3), counter=n) for n in range(BEST + 50)))
    found = read_content(many)
    assert len(found.best) == BEST and found.entries == BEST + 50
    assert [entry["content"] for entry in found.best[:2]] == ["347", "344"]
    with pytest.raises(CheckpointError, match="an entry of the memory: not JSON"):
        read_content([*many, b"{nonsense\n"])
