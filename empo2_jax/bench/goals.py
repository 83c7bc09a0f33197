"""The committed goals of `goals.toml`, and which of them a measurement meets.

Only stable figures can fail a check: CPU-time ratios, bytes, FLOPs, errors and equality. Wall-clock figures depend on
what else the machine does and only warn. A goal that an honest try did not reach stays as it is and missed; it may
name the decision record that says what limits it, and the bound below which a check fails all the same.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from empo2_jax.bench.base import Result

WALL_CLOCK = ("wall_ratio", "seconds", "blocked_seconds", "gb_per_second")
# case → figure → {least: x} or {most: x}; with {accepted: y, adr: n} a miss up to y is explained by docs/adr/n
Goals = Mapping[str, Mapping[str, Mapping[str, float | int]]]


class Verdict(NamedTuple):
    """One goal and what became of it."""

    case: str
    figure: str
    value: float  # NaN: not measured
    goal: str
    met: bool
    adr: int | None = None  # number of the record that explains this miss; None: met, or no record explains it

    @property
    def stable(self) -> bool:
        """Whether the figure does not depend on what else the machine does."""
        return self.figure not in WALL_CLOCK

    @property
    def failed(self) -> bool:
        """Whether a check fails by it."""
        return self.stable and not self.met and self.adr is None


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
            verdicts.append(_verdict(name, figure, value, goal))
    return verdicts


def _verdict(case: str, figure: str, value: float, goal: Mapping[str, float | int]) -> Verdict:
    (side,) = goal.keys() & {"least", "most"}
    sign = 1 if side == "least" else -1
    met = sign * value >= sign * goal[side]
    text = f"{'≥' if side == 'least' else '≤'} {goal[side]:g}"
    if met or "adr" not in goal or not sign * value >= sign * goal["accepted"]:
        return Verdict(case, figure, value, text, met)
    return Verdict(case, figure, value, text, met, int(goal["adr"]))
