"""The retrieval browser: what memory answered in which state, and what lies in it."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from empo2_jax.metrics import Record
from empo2_jax.prompts import tip_of
from empo2_jax.report.parts import Cell, Section, Table, first_of, text
from empo2_jax.report.run_files import Kept
from empo2_jax.report.tip_effects import TipEffects
from empo2_jax.types import Mode

STATES_SHOWN, TIPS_SHOWN, BUFFERS_SHOWN = 200, 5, 50


@dataclass
class State:
    """All lookups in one state of one task."""

    asked: int = 0
    answered: int = 0
    first: int = 0  # iteration
    last: int = 0
    tips: Counter[str] = field(default_factory=Counter)  # times that an entry was shown
    scores: dict[str, float] = field(default_factory=dict)  # of the entry, when it was last shown


class Lookups:
    """Lookups of recorded episodes, counted by task and state."""

    def __init__(self) -> None:
        self.states: dict[tuple[str, str], State] = defaultdict(State)

    def add(self, iteration: int, episodes: Sequence[Record]) -> None:
        """Count the steps of the episodes that acted with memory."""
        for episode in episodes:
            for step in episode["steps"] if episode["mode"] != Mode.ON_POLICY.name else ():
                state = self.states[episode["task"], step["state_before"]]
                state.first = state.first if state.asked else iteration
                state.last = iteration
                state.asked += 1
                state.answered += bool(step["tips"])
                for tip in step["tips"]:
                    state.tips[tip["content"]] += 1
                    state.scores[tip["content"]] = tip["score"]


def section(lookups: Lookups, kept: Kept | None, effects: TipEffects) -> Section:
    """States with what was found in them; the memory's buffers and entries with what each tip did."""
    asked = sum(state.asked for state in lookups.states.values())
    answered = sum(state.answered for state in lookups.states.values())
    missing, tables = [], []
    if asked:
        tables.append(_states(lookups))
    else:
        missing.append("No recorded episode acted with memory.")
    if kept is None:
        missing.append("The content of the memory is not shown: no checkpoint of this run can be read.")
    elif not kept.memory.entries:
        missing.append(f"The memory is empty at checkpoint {kept.step}.")
    else:
        tables += [_buffers(kept), _entries(kept, effects)]
    about = f"{asked:,} lookups were recorded, and {answered:,} of them found a tip." if asked else ""
    return Section("Retrieval", about, tables=tables, missing=missing)


def _states(lookups: Lookups) -> Table:
    most = sorted(lookups.states.items(), key=lambda item: (-item[1].asked, item[0]))[:STATES_SHOWN]
    rows = []
    for (task, name), state in most:
        shown = [
            f"{times}× {content} [{text(state.scores[content])}]"
            for content, times in state.tips.most_common(TIPS_SHOWN)
        ]
        more = [f"and {len(state.tips) - TIPS_SHOWN:,} more"] if len(state.tips) > TIPS_SHOWN else []
        iterations = f"{state.first} – {state.last}"
        hits = f"{state.answered:,} of {state.asked:,}"
        rows.append([Cell(name, search=name), task, "\n".join(shown + more) or "none", hits, iterations])
    note = first_of(len(rows), len(lookups.states), "States", "those asked most often first")
    columns = ["state", "task", "tips found: times, entry [score]", "lookups with a tip", "iterations"]
    return Table("What memory answered", note, columns, rows, filtered=True)


def _buffers(kept: Kept) -> Table:
    largest = sorted(kept.memory.buffers.items(), key=lambda item: (-item[1].entries, item[0]))[:BUFFERS_SHOWN]
    rows = [
        [
            name,
            f"{buffer.entries:,}",
            f"{buffer.total / buffer.entries:.1f}",
            f"{buffer.best:.1f}",
            f"{buffer.first} – {buffer.last}",
        ]
        for name, buffer in largest
    ]
    order = first_of(len(rows), len(kept.memory.buffers), "Buffers", "largest first")
    columns = ["buffer", "entries", "mean score", "best score", "written in iterations"]
    return Table("Buffers of the memory", f"At checkpoint {kept.step}. {order}", columns, rows, filtered=True)


def _entries(kept: Kept, effects: TipEffects) -> Table:
    gains, rows = _gains(effects), []
    for tip in kept.memory.best:
        seen, gain = gains.get(tip_of(tip["content"]), (0, 0.0))
        effect = [f"{seen:,}", f"{gain:+.1f}"] if seen else ["0", "–"]
        where = Cell(tip["episode"], search=tip["episode"])
        rows.append([tip["content"], tip["buffer"], f"{tip['score']:.1f}", where, *effect])
    order = first_of(len(rows), kept.memory.entries, "Entries", "best score first, then newest")
    columns = ["entry", "buffer", "score", "written after", "episodes compared", "gain of its tip"]
    return Table("Entries of the memory", f"At checkpoint {kept.step}. {order}", columns, rows, filtered=True)


def _gains(effects: TipEffects) -> dict[str, tuple[int, float]]:
    """(episodes that saw it, points gained per episode) by tip, over all tasks."""
    found: dict[str, tuple[int, float]] = {}
    for (_, tip), effect in effects.found.items():
        episodes, moved = found.get(tip, (0, 0.0))
        found[tip] = episodes + effect.episodes, moved + effect.moved
    return {tip: (episodes, moved / episodes) for tip, (episodes, moved) in found.items()}
