"""What a soak kills and when, and what it must have left: the plan, the count of episodes, slopes. Nothing runs here.

A moment is a place in the run, so many iterations and a share of the next one, not a time: it means the same on any
machine, and a run that is killed again and again still gets on.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from empo2_jax.errors import DataError
from empo2_jax.metrics import EPISODES_FOLDER, read_jsonl, read_metrics
from empo2_jax.randomness import generator
from empo2_jax.types import StopReason

Kind = Literal["JVM", "server", "trainer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PER_ITERATION = 1.5  # faults while all kinds fall


class Fault(NamedTuple):
    """One kill: of what, after how many iterations, and at what share of the next one."""

    kind: Kind
    iteration: int
    share: float


class Count(NamedTuple):
    """The episodes of a finished run."""

    expected: int
    lost: int  # of those that are expected: not there, or given up
    duplicate: int  # that are there once more, or that nobody asked for
    miscounted_steps: int  # between the run's own total, which comes through every checkpoint, and the episodes' steps
    incomplete: frozenset[int]  # iterations, from 1, with an episode lost or duplicate


def calm_from(iterations: int) -> int:
    """After so many iterations only simulators are killed, so that a life is long enough to see memory grow."""
    return iterations // 2


def plan(seed: int, iterations: int) -> list[Fault]:
    """The faults of a run in their order: each kind as often as the others, then simulators alone.

    The first iteration is spared: nothing is compiled yet.
    """
    draw, calm = generator(seed, "soak"), calm_from(iterations)
    kinds = [kind for kind in KINDS for _ in range(round(PER_ITERATION * (calm - 1) / len(KINDS)))]
    places = sorted(draw.uniform(1, calm, len(kinds)))
    kinds = [kinds[index] for index in draw.permutation(len(kinds))] + ["JVM"] * ((iterations - calm) // 2)
    places += sorted(draw.uniform(calm, iterations, (iterations - calm) // 2))
    return [Fault(kind, int(place), float(place % 1)) for kind, place in zip(kinds, places, strict=True)]


def episode_ids(iteration: int, groups: int, size: int) -> set[str]:
    """Those that an iteration, from 1, must have."""
    return {f"i{iteration - 1}/g{group}/e{member}" for group in range(groups) for member in range(size)}


def count_episodes(run_dir: Path, iterations: int, groups: int, size: int) -> Count:
    """Compare what a run recorded with what it was to play; an iteration's record counts like its episodes.

    Raises:
        DataError: `metrics.jsonl` cannot be read.
    """
    records = read_metrics(run_dir)
    told = Counter(record["iteration"] for record in records)
    lost = duplicate = steps = 0
    incomplete = set()
    for iteration in range(1, iterations + 1):
        episodes = _episodes(run_dir / EPISODES_FOLDER / f"{iteration}.jsonl") if told[iteration] else []
        steps += sum(len(episode["steps"]) for episode in episodes)
        wanted, seen = episode_ids(iteration, groups, size), Counter(episode["id"] for episode in episodes)
        good = {episode["id"] for episode in episodes if StopReason(episode["stop_reason"]).valid}
        missing, again = len(wanted - good), sum(number - (name in wanted) for name, number in seen.items())
        again += len(wanted) * max(told[iteration] - 1, 0)
        lost, duplicate = lost + missing, duplicate + again
        if missing or again:
            incomplete.add(iteration)
    total = int(records[-1]["total/environment_steps"]) if records else 0
    return Count(iterations * groups * size, lost, duplicate, abs(total - steps), frozenset(incomplete))


def _episodes(path: Path) -> list[dict]:
    try:
        return read_jsonl(path)
    except DataError:  # an iteration that is not there has lost them all
        return []


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Median of the slopes between any two points (Theil and Sen): a few jumps do not count; 0 without two places."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if a[0] != b[0]]
    return statistics.median(slopes) if slopes else 0.0


def growth(values: Sequence[float]) -> float:
    """Largest of the last quarter less largest of the first: what comes and goes does not count."""
    quarter = max(1, len(values) // 4)
    return max(values[-quarter:]) - max(values[:quarter]) if values else 0.0
