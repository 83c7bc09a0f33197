"""The results of a study as tables: rows of text that the terminal and the page share."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from empo2_jax.study.results import Results
from empo2_jax.study.runs import SPENT
from empo2_jax.study.statistics import Estimate


@dataclass(frozen=True)
class Table:
    """A title, what its numbers are, and texts."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]


def tables(results: Results) -> list[Table]:
    """All tables: scores, seeds, tasks where there are several, cost."""
    made = [scores(results), seeds(results)]
    if len(results.rows[0]["tasks"]) > 1:
        made.append(tasks(results))
    return [*made, cost(results)]


def scores(results: Results) -> Table:
    """One row per arm with intervals, and the tested arm's difference from it."""
    rows = []
    for name in results.names:
        mine = results.of(name)
        difference = None if name == results.tested else results.difference(name)
        rows.append(
            [
                name,
                str(len(mine)),
                f"{fmean(row['score'] for row in mine):.1f}",
                interval_text(results.score(name)),
                f"{100 * fmean(row['success'] for row in mine):.1f}",
                interval_text(difference, signed=True) if difference else "",
            ]
        )
    note = (
        "Score without memory at the last evaluation, points. Interquartile mean over seeds and tasks with its 95 % "
        f"interval (bootstrap within tasks); success in %; {results.tested} less the arm, over the seeds that both "
        "have: mean and 95 % interval (Student's t)."
    )
    columns = ["arm", "seeds", "mean", "interquartile mean", "success", f"{results.tested} − arm"]
    return Table("Scores", note, columns, rows)


def seeds(results: Results) -> Table:
    """Score of every run."""
    by_arm = {name: {row["seed"]: row["score"] for row in results.of(name)} for name in results.names}
    numbers = sorted({seed for scores in by_arm.values() for seed in scores})
    rows = [[str(n), *(f"{s[n]:.1f}" if n in s else "missing" for s in by_arm.values())] for n in numbers]
    return Table("Seeds", "Score without memory of every run, points.", ["seed", *by_arm], rows)


def tasks(results: Results) -> Table:
    """Mean score by task and arm."""
    names = list(results.rows[0]["tasks"])
    rows = [
        [task, *(f"{fmean(row['tasks'].get(task, np.nan) for row in results.of(arm)):.1f}" for arm in results.names)]
        for task in names
    ]
    return Table("Tasks", "Score without memory by task, mean over seeds, points.", ["task", *results.names], rows)


def cost(results: Results) -> Table:
    """Means of what the runs of an arm took."""
    rows = []
    for name in results.names:
        mine = results.of(name)
        shares = [row["memory_share"] for row in mine if row["memory_share"] is not None]
        means = [fmean(row[key] for row in mine) for key in ("seconds", "updates", *SPENT)]
        rows.append([name, *(f"{value:,.0f}" for value in means), f"{100 * fmean(shares):.0f}" if shares else "–"])
    columns = ["arm", "seconds", "updates", *(key.replace("_", " ") for key in SPENT), "memory, % of rollout"]
    return Table("Cost", "Means over runs; seconds of training without start and evaluation.", columns, rows)


def interval_text(estimate: Estimate, signed: bool = False) -> str:
    """Value and interval; only the value where there is no interval."""
    sign = "+" if signed else ""
    if not np.isfinite([estimate.low, estimate.high]).all():
        return f"{estimate.value:{sign}.1f}"
    return f"{estimate.value:{sign}.1f} [{estimate.low:{sign}.1f}, {estimate.high:{sign}.1f}]"


def print_results(results: Results) -> None:
    """All tables on the terminal."""
    console = Console()
    if not results.rows:
        console.print(f"study {results.study}: no finished run")
        return
    for table in tables(results):
        console.print(_rich(f"study {results.study}: {table.title.lower()}", table.columns, table.rows))


def _rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RichTable:
    made = RichTable(*columns, title=title)
    for row in rows:
        made.add_row(*row)
    return made
