"""What all suites share: a case with its two sides, what was measured of them, and what follows from that.

The rules: each side runs in a process of its own, both on the same cores, in turn; at least three pairs; a speed is the
median of the pairs' ratios, in wall-clock and in CPU seconds; a speed whose two answers differ is void. Nothing here
runs anything (`runner.py`) or knows a goal (`goals.py`).
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Shaped

PAIRS = 3
Clock = Literal["wall", "cpu"]
Answers = Mapping[str, Shaped[np.ndarray, "..."]]


@dataclass(frozen=True)
class Side:
    """One way to do a piece of work, warm and ready. The function that a case names makes it in the child process."""

    run: Callable[[], object]  # one timed piece of work
    answer: Callable[[], Answers] = dict  # what the other side must agree with, after the runs
    figures: Callable[[], Mapping[str, float]] = dict  # bytes, FLOPs, errors: what does not depend on the clock
    work: int = 1  # units in one run; seconds are per unit
    helpers_cpu: Callable[[], float] = lambda: 0.0  # CPU seconds of processes beside this one


@dataclass(frozen=True)
class Case:
    """One row of the table. `ours` and `peer` are `module:function`; both get the arguments and return a `Side`."""

    name: str  # suite/case
    ours: str
    peer: str = ""  # "" = compared with no one
    arguments: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    tolerances: Mapping[str, float] = field(default_factory=dict)  # largest difference of each answer; 0 = identical
    unit: str = "run"
    flops: float = 0.0  # least work of a unit
    bytes: float = 0.0  # least memory traffic of a unit
    timed: bool = True  # False: only figures are wanted
    pairs: int = PAIRS


class Sample(NamedTuple):
    """Seconds of one unit of work."""

    wall: float
    cpu: float


class Measured(NamedTuple):
    """One side of a case."""

    samples: tuple[Sample, ...]
    rss: float  # bytes, the largest peak of its process
    figures: Mapping[str, float]

    def seconds(self, clock: Clock) -> float:
        """Median seconds of a unit."""
        return statistics.median(getattr(sample, clock) for sample in self.samples)


class Spread(NamedTuple):
    """Median of some ratios with the smallest and largest."""

    median: float
    least: float
    most: float


class Peaks(NamedTuple):
    """What the pinned cores can do at best, measured."""

    flops: float  # f32 matrix product, per second
    bandwidth: float  # bytes read from memory per second


@dataclass(frozen=True)
class Result:
    """A case as measured; a side that did not come about is None, and `problem` says why."""

    case: Case
    ours: Measured | None
    peer: Measured | None
    differences: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    load: tuple[float, float] = (0.0, 0.0)  # load average of the machine before and after

    @property
    def equal(self) -> bool | None:
        """Whether every answer is as near as the case asks; None where nothing was compared."""
        if self.ours is None or self.peer is None or not self.case.tolerances:
            return None
        return all(self.differences.get(name, np.inf) <= most for name, most in self.case.tolerances.items())

    def speed(self, clock: Clock) -> Spread | None:
        """How many times faster we are; None where the row is void: no peer, or not shown to be equal."""
        if self.ours is None or self.peer is None or not self.equal or not self.case.timed:
            return None
        pairs = zip(self.ours.samples, self.peer.samples, strict=True)
        ratios = [getattr(peer, clock) / getattr(ours, clock) for ours, peer in pairs]
        return Spread(statistics.median(ratios), min(ratios), max(ratios))

    def limit(self, peaks: Peaks) -> float | None:
        """Seconds of a unit at the limit of the hardware, None where the case names none."""
        seconds = max(self.case.flops / peaks.flops, self.case.bytes / peaks.bandwidth)
        return seconds or None

    def figures(self) -> dict[str, float]:
        """Every figure a goal can name.

        `wall_ratio`, `cpu_ratio`: the speeds. `seconds`, `cpu_seconds`, `rss`: ours alone. A figure of ours by its
        name, and `NAME_ratio`, the peer's over ours, where both sides have it and are not shown to differ.
        """
        if self.ours is None:
            return {}
        found = {"rss": self.ours.rss, **self.ours.figures}
        if self.case.timed:
            found |= {"seconds": self.ours.seconds("wall"), "cpu_seconds": self.ours.seconds("cpu")}
        for clock in ("wall", "cpu"):
            if speed := self.speed(clock):
                found[f"{clock}_ratio"] = speed.median
        if self.peer is not None and self.equal is not False:
            both = self.ours.figures.keys() & self.peer.figures.keys()
            found |= {f"{name}_ratio": self.peer.figures[name] / self.ours.figures[name] for name in both}
        return found


def difference(ours: Shaped[np.ndarray, "..."], peer: Shaped[np.ndarray, "..."]) -> float:
    """Largest absolute difference; infinite for other shapes or anything not finite."""
    if ours.shape != peer.shape:
        return float("inf")
    gaps = np.abs(np.asarray(ours, np.float64) - np.asarray(peer, np.float64))
    largest = float(gaps.max(initial=0.0))
    return largest if np.isfinite(largest) else float("inf")


def differences(ours: Answers, peer: Answers, names: Sequence[str]) -> dict[str, float]:
    """`difference` of every named answer; infinite where a side lacks it."""
    return {
        name: difference(ours[name], peer[name]) if name in ours and name in peer else float("inf") for name in names
    }
