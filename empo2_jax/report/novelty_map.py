"""The novelty map: where the states of the novelty store lie, how often each was visited, what novelty paid for."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32

from empo2_jax.charts import scatter_chart
from empo2_jax.metrics import Record
from empo2_jax.report.parts import Cell, Chart, Section, Table, first_of, spread, text
from empo2_jax.report.run_files import Kept

DOTS, KEYS, STATES_SHOWN = 1500, 7, 200
OTHERS = "others"


@dataclass
class Visited:
    """A state as text, in the recorded episodes of one task."""

    visits: int = 0
    first: int = 0  # iteration
    last: int = 0
    paid_first: float = 0.0  # novelty of the first and of the newest visit, points
    paid_last: float = 0.0


class Visits:
    """Visits of recorded episodes, counted by task and text of the state."""

    def __init__(self) -> None:
        self.states: dict[tuple[str, str], Visited] = defaultdict(Visited)

    def add(self, iteration: int, episodes: Sequence[Record]) -> None:
        """Count the states that actions reached: those before the next action (the last one is not recorded)."""
        for episode in episodes:
            for step, after in zip(episode["steps"], episode["steps"][1:], strict=False):
                state = self.states[episode["task"], after["state_before"]]
                paid = step["intrinsic_reward"]
                if not state.visits:
                    state.first, state.paid_first = iteration, paid
                state.visits += 1
                state.last, state.paid_last = iteration, paid


def section(kept: Kept | None, visits: Visits) -> Section:
    """The map of the newest checkpoint and the states by their texts."""
    missing, charts = [], []
    if kept is None:
        missing.append("There is no map: no checkpoint of this run can be read.")
    elif not kept.visits:
        missing.append(
            f"There is no map: no state is kept at checkpoint {kept.step} (intrinsic.kind = count keeps them)."
        )
    elif len(kept.states):
        charts.append(_map(kept))
    tables = [_texts(visits)] if visits.states else []
    return Section("Novelty map", charts=charts, tables=tables, missing=missing)


def project(states: Float32[np.ndarray, "N D"]) -> tuple[Float[np.ndarray, "N 2"], float]:
    """Places on the two directions of the greatest variance, and the share of the variance that they have, 0–1.

    The sign of a direction is such that the largest coordinate along it is positive.
    """
    centered = states.astype(np.float64) - states.mean(axis=0, dtype=np.float64)
    values, directions = np.linalg.eigh(centered.T @ centered)
    values, directions = np.clip(values[::-1], 0, None), directions[:, ::-1][:, :2]
    places = centered @ directions
    places = np.pad(places, ((0, 0), (0, 2 - places.shape[1])))
    strongest = places[np.abs(places).argmax(axis=0), [0, 1]]
    whole = values.sum()
    return places * np.where(strongest < 0, -1.0, 1.0), float(values[:2].sum() / whole) if whole > 0 else 1.0


def _map(kept: Kept) -> Chart:
    keys = [key for key, counts in kept.visits.items() for _ in counts]
    counts = [count for key_counts in kept.visits.values() for count in key_counts]
    places, share = project(kept.states)
    most = sorted(kept.visits, key=lambda key: (-len(kept.visits[key]), key))
    named = set(most if len(most) <= KEYS + 1 else most[:KEYS])
    dots: dict[str, list[tuple[float, float, float]]] = {key: [] for key in sorted(named)}
    shown = spread(range(len(counts)), DOTS)
    for row in shown:
        label = keys[row] if keys[row] in named else OTHERS
        dots.setdefault(label, []).append((*places[row].tolist(), 2 + np.log10(counts[row]) * 2.2))
    title = "Map of the states"
    note = (
        f"{len(counts):,} distinct states at checkpoint {kept.step} on the two main directions of their embeddings "
        f"({100 * share:.0f} % of the variance); a larger dot was visited more often, up to {max(counts):,} times; "
        f"every task is shifted a little, so that equal states of several are seen"
        f"{f'; {len(shown):,} of them are drawn' if len(shown) < len(counts) else ''}."
    )
    rows = [
        [key, f"{len(kept.visits[key]):,}", f"{sum(kept.visits[key]):,}", f"{max(kept.visits[key], default=0):,}"]
        for key in most[:100]
    ]
    table = Table(title, "", ["task", "distinct states", "visits", "visits of the most visited"], rows)
    return Chart(title, note, scatter_chart(title, dots), table)


def _texts(visits: Visits) -> Table:
    most = sorted(visits.states.items(), key=lambda item: (-item[1].visits, item[0]))[:STATES_SHOWN]
    rows = [
        [
            Cell(name, search=name),
            task,
            f"{state.visits:,}",
            f"{state.first} – {state.last}",
            f"{text(state.paid_first)} → {text(state.paid_last)}",
        ]
        for (task, name), state in most
    ]
    note = first_of(len(rows), len(visits.states), "States of recorded episodes", "most visited first")
    columns = ["state", "task", "visits", "iterations", "novelty paid, first → last"]
    return Table("States by their text", note, columns, rows, filtered=True)
