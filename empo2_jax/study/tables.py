"""The results of a study as tables: rows of text that the terminal and the page share."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from empo2_jax.metrics import Record
from empo2_jax.study.remarks import remarks
from empo2_jax.study.results import Results
from empo2_jax.study.rows import SPENT
from empo2_jax.study.statistics import Estimate, paired_interval


@dataclass(frozen=True)
class Table:
    """A title, what its numbers are, and texts."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]


_LONGEST_LINE = 100_000  # letters of a printed table
TRIED_NOTE = " † Of the last trial, which has seen test rewards."


def marked(results: Results, name: str) -> str:
    """The name of an arm, with a sign where its score is no evaluation without memory."""
    return f"{name} †" if name in results.tried else name


def tried_note(results: Results) -> str:
    """What that sign says; "" where there is none."""
    return TRIED_NOTE if results.tried else ""


def tables(results: Results) -> list[Table]:
    """All tables: scores, seeds, tasks where there are several, adaptation and entropy where they are known, cost."""
    made = [scores(results), seeds(results)]
    if len(results.rows[0]["tasks"]) > 1:
        made.append(tasks(results))
    return [*made, *(table for table in (adaptation(results), entropy(results)) if table.rows), cost(results)]


def scores(results: Results) -> Table:
    """One row per arm with intervals, and the tested arm's difference from it."""
    rows = []
    for name in results.names:
        mine = results.of(name)
        difference = None if name == results.tested else results.difference(name)
        rows.append(
            [
                marked(results, name),
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
        f"have: mean and 95 % interval (Student's t).{tried_note(results)}"
    )
    columns = ["arm", "seeds", "mean", "interquartile mean", "success", f"{results.tested} − arm"]
    return Table("Scores", note, columns, rows)


def seeds(results: Results) -> Table:
    """Score of every run: one row per arm, one column per seed."""
    by_arm = {name: {row["seed"]: row["score"] for row in results.of(name)} for name in results.names}
    numbers = sorted({seed for scores in by_arm.values() for seed in scores})
    rows = [
        [marked(results, name), *(f"{scores[n]:.1f}" if n in scores else "missing" for n in numbers)]
        for name, scores in by_arm.items()
    ]
    note = f"Score without memory of every run, points.{tried_note(results)}"
    return Table("Seeds", note, ["arm", *map(str, numbers)], rows)


def tasks(results: Results) -> Table:
    """Mean score by task and arm."""
    names = list(results.rows[0]["tasks"])
    rows = [
        [task, *(f"{fmean(row['tasks'].get(task, np.nan) for row in results.of(arm)):.1f}" for arm in results.names)]
        for task in names
    ]
    columns = ["task", *(marked(results, name) for name in results.names)]
    note = f"Score without memory by task, mean over seeds, points.{tried_note(results)}"
    return Table("Tasks", note, columns, rows)


def adaptation(results: Results) -> Table:
    """What trials with memory and fixed weights change, by arm."""
    rows = []
    for name in results.names:
        curves = [row["adaptation"] for row in results.of(name) if "adaptation" in row]
        if not curves:
            continue
        first, last = ([curve["score"][place] for curve in curves] for place in (0, -1))
        best = fmean(curve["best"][-1] for curve in curves)
        change = interval_text(paired_interval(last, first), signed=True)
        rows.append([name, f"{fmean(first):.1f}", f"{fmean(last):.1f}", change, f"{best:.1f}"])
    note = (
        "Test-time adaptation (sees test rewards): points of the first trial, which has no tips yet, of the last one, "
        "last less first (mean and 95 % interval over seeds, Student's t), and of the best episodes of all trials."
    )
    return Table("Adaptation", note, ["arm", "first trial", "last trial", "last − first", "best"], rows)


def entropy(results: Results) -> Table:
    """Entropy of the actions by quarter of the training, and how far the first and last are from the reference's."""
    parts = {
        name: {row["seed"]: nats for row in results.of(name) if (nats := _quarters(row))} for name in results.names
    }
    reference = parts.get(results.reference, {})
    rows = []
    for name, mine in parts.items():
        if not mine:
            continue
        seeds = sorted(mine.keys() & reference.keys()) if name != results.reference else []
        pairs = [([mine[s][at] for s in seeds], [reference[s][at] for s in seeds]) for at in (0, -1)]
        differences = [interval_text(paired_interval(*pair), signed=True, digits=3) if seeds else "" for pair in pairs]
        rows.append([name, *(f"{fmean(quarter):.3f}" for quarter in zip(*mine.values(), strict=True)), *differences])
    note = (
        "Nats per action token of the training episodes, by quarter of the iterations: means over seeds; the first and "
        f"the last quarter less those of {results.reference}: mean and 95 % interval (Student's t)."
    )
    return Table("Entropy", note, ["arm", "1st", "2nd", "3rd", "4th", "1st − reference", "4th − reference"], rows)


def _quarters(row: Record) -> list[float]:
    """Means over the quarters of a run's iterations; [] for fewer than four."""
    nats = [entropy for _, _, entropy, _ in row["training"] if entropy is not None]
    return [float(part.mean()) for part in np.array_split(nats, 4)] if len(nats) >= 4 else []


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


def interval_text(estimate: Estimate, signed: bool = False, digits: int = 1) -> str:
    """Value and interval; only the value where there is no interval."""
    form = f"{'+' if signed else ''}.{digits}f"
    if not np.isfinite([estimate.low, estimate.high]).all():
        return f"{estimate.value:{form}}"
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"


def print_results(results: Results) -> None:
    """All tables on the terminal, and what has to be said of them."""
    console = Console(width=_LONGEST_LINE)  # on a narrow terminal lines go on below, nothing is cut off
    if not results.rows:
        console.print(f"study {results.study}: no finished run")
        return
    for table in tables(results):
        console.print(_rich(f"study {results.study}: {table.title.lower()}", table.columns, table.rows))
    for remark in remarks(results):
        console.print(remark, style="yellow", markup=False, soft_wrap=True)


def _rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RichTable:
    made = RichTable(*map(escape, columns), title=escape(title))
    for row in rows:
        made.add_row(*map(escape, row))
    return made
