"""Which tips helped and which hurt: the score with the tip against the score without, on the same task.

An episode that saw a tip is compared with the members of its own group that acted without any: the same task, the same
weights, the same iteration. Tips that were shown together share what they did, and a tip that few groups saw shows
mostly luck; both are said on the page.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from empo2_jax.metrics import Record
from empo2_jax.prompts import tip_of
from empo2_jax.report.groups import members_by_group
from empo2_jax.report.parts import Cell, Section, Table
from empo2_jax.types import Mode

SHOWN = 15  # tips in each table


@dataclass
class Effect:
    """One tip on one task over all groups; sums go over the episodes that saw it."""

    episodes: int = 0  # that saw it, in groups with members that acted without any
    scores: float = 0.0  # points
    without: float = 0.0  # points, had each scored the mean of its group's members without tips
    better: int = 0  # groups in which those that saw it scored more
    worse: int = 0

    @property
    def moved(self) -> float:
        """Points over all episodes that saw it."""
        return self.scores - self.without

    @property
    def gain(self) -> float:
        """Points per episode."""
        return self.moved / self.episodes


class TipEffects:
    """Effects by task and tip (one sentence, without action and score of the entry), over recorded episodes."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Effect] = defaultdict(Effect)

    def add(self, episodes: Sequence[Record]) -> None:
        """Compare within the groups of one iteration; one without valid members of both kinds says nothing."""
        for members in members_by_group(episodes).values():
            seen = [{tip_of(tip["content"]) for step in member["steps"] for tip in step["tips"]} for member in members]
            scores = [member["score"] for member in members]
            plain = [member["mode"] == Mode.ON_POLICY.name for member in members]
            bare = [score for score, tips, alone in zip(scores, seen, plain, strict=True) if alone and not tips]
            for tip in set().union(*seen) if bare else ():
                saw = [score for score, tips in zip(scores, seen, strict=True) if tip in tips]
                effect, gain = self.found[members[0]["task"], tip], fmean(saw) - fmean(bare)
                effect.episodes += len(saw)
                effect.scores += sum(saw)
                effect.without += len(saw) * fmean(bare)
                effect.better += gain > 0
                effect.worse += gain < 0

    def ranked(self) -> list[tuple[str, str, Effect]]:
        """(task, tip, effect) by the points moved, the most helpful first."""
        rows = [(task, tip, effect) for (task, tip), effect in self.found.items()]
        return sorted(rows, key=lambda row: (-row[2].moved, row[0], row[1]))


def section(effects: TipEffects, recorded: int) -> Section:
    """The tips that helped and those that hurt; `recorded` episodes were looked at."""
    found = effects.ranked()
    title = "Tips that helped and hurt"
    if not found:
        why = "no recorded group has valid episodes that saw a tip beside others that acted without any"
        return Section(title, missing=[f"Nothing can be compared: {why} ({recorded:,} episodes were recorded)."])
    helped = [row for row in found if row[2].moved > 0]
    hurt = [row for row in reversed(found) if row[2].moved < 0]
    about = (
        "Mean score of the episodes that saw a tip against that of the members of the same groups (same task, same "
        "weights) that acted without any. Ordered by the points moved: gain × episodes. Tips shown together share "
        "what they did, and one that few groups saw shows mostly luck. "
        f"Of {len(found):,} pairs of a task and a tip seen on it, {len(helped):,} helped and {len(hurt):,} hurt."
    )
    return Section(title, about, tables=[_table("Helped", helped), _table("Hurt", hurt)])


def _table(title: str, found: Sequence[tuple[str, str, Effect]]) -> Table:
    columns = ["tip", "task", "with", "without", "gain", "episodes", "groups better / worse"]
    rows = [
        [
            Cell(tip, search=tip),
            task,
            f"{effect.scores / effect.episodes:.1f}",
            f"{effect.without / effect.episodes:.1f}",
            f"{effect.gain:+.1f}",
            str(effect.episodes),
            f"{effect.better} / {effect.worse}",
        ]
        for task, tip, effect in found[:SHOWN]
    ]
    note = f"The {SHOWN} that moved most, of {len(found):,}." if len(found) > SHOWN else ""
    return Table(title, note if rows else "None.", columns, rows, filtered=True)
