"""The committed goals of `goals.toml`, and which of them a measurement meets.

Only stable figures can fail a check: CPU-time ratios, bytes, FLOPs, errors and equality. Wall-clock figures depend on
what else the machine does and only warn.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from empo2_jax.bench.base import Result

WALL_CLOCK = ("wall_ratio", "seconds")
Goals = Mapping[str, Mapping[str, Mapping[str, float]]]  # case → figure → {least: x} or {most: x}


class Verdict(NamedTuple):
    """One goal and what became of it."""

    case: str
    figure: str
    value: float  # NaN: not measured
    goal: str
    met: bool

    @property
    def stable(self) -> bool:
        """Whether the figure does not depend on what else the machine does."""
        return self.figure not in WALL_CLOCK

    @property
    def failed(self) -> bool:
        """Whether a check fails by it."""
        return self.stable and not self.met


def load() -> Goals:
    """The goals that come with the package."""
    return tomllib.loads((files("empo2_jax.bench") / "goals.toml").read_text(encoding="utf-8"))


def judge(results: Sequence[Result], goals: Goals) -> list[Verdict]:
    """Every goal of every case that was run; a figure that is missing, void or not finite meets none."""
    verdicts = []
    for result in results:
        name, figures = result.case.name, result.figures()
        if result.case.tolerances:
            verdicts.append(Verdict(name, "equal", float(bool(result.equal)), "yes", bool(result.equal)))
        for figure, goal in goals.get(name, {}).items():
            value = figures.get(figure, math.nan)
            met = all(value >= bound if side == "least" else value <= bound for side, bound in goal.items())
            text = ", ".join(f"{'≥' if side == 'least' else '≤'} {bound:g}" for side, bound in goal.items())
            verdicts.append(Verdict(name, figure, value, text, met))
    return verdicts
