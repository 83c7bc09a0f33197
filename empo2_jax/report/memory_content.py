"""What lies in a memory: its buffers in numbers and its best entries, from a dump of any length read line by line."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pydantic import with_config
from typing_extensions import TypedDict

from empo2_jax.errors import CheckpointError
from empo2_jax.metrics import Record
from empo2_jax.readers import RECORD, Whole, parse_json

BEST = 300  # entries that are kept as they are


@with_config(RECORD)
class Entry(TypedDict):
    """What is read of an entry."""

    buffer: str
    content: str
    counter: Whole
    episode: str
    iteration: Whole
    score: float


@dataclass
class Buffer:
    """One buffer."""

    entries: int = 0
    total: float = 0.0  # sum of the scores
    best: float = float("-inf")  # score
    first: int = 0  # iteration in which the oldest and the newest entry were written
    last: int = 0


@dataclass(frozen=True)
class Content:
    """A whole memory."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    best: list[Record] = field(default_factory=list)  # by score, ties: newer first

    @property
    def entries(self) -> int:
        """In all buffers."""
        return sum(buffer.entries for buffer in self.buffers.values())


def read_content(lines: Iterable[bytes]) -> Content:
    """From the lines of a dump behind its header; raises `CheckpointError` where one is something else."""
    buffers: dict[str, Buffer] = defaultdict(Buffer)
    best = heapq.nsmallest(BEST, _counted(lines, buffers), key=lambda tip: (-tip["score"], -tip["counter"]))
    return Content(dict(buffers), best)


def _counted(lines: Iterable[bytes], buffers: dict[str, Buffer]) -> Iterator[Record]:
    for line in lines:
        tip = parse_json(line, Entry, "an entry of the memory", CheckpointError)
        buffer, iteration = buffers[tip["buffer"]], tip["iteration"]
        buffer.first = min(buffer.first, iteration) if buffer.entries else iteration
        buffer.last = max(buffer.last, iteration)
        buffer.entries += 1
        buffer.total += tip["score"]
        buffer.best = max(buffer.best, tip["score"])
        yield tip
