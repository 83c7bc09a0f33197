"""One self-contained HTML page: of a study from its results file, or of several runs beside each other.

It needs no network and no script. Every figure names the command, commit and configurations behind it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from empo2_jax.charts import interval_chart, line_chart, number_text
from empo2_jax.errors import DataError
from empo2_jax.metrics import Record, write_atomically
from empo2_jax.report.template import filled
from empo2_jax.study.results import Results
from empo2_jax.study.rows import TRIED
from empo2_jax.study.statistics import bootstrap
from empo2_jax.study.tables import Table, tables

PAGE_FILE = "study.html"
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Figure:
    """A picture, what it shows, and the numbers behind it."""

    title: str
    note: str
    svg: str
    table: Table


def write_page(results: Results, path: Path) -> Path:
    """Write the page of a study; raises `DataError` where no run of it has finished."""
    if not results.rows:
        raise DataError(f"study {results.study}: no finished run: {'; '.join(results.failed[:3]) or 'none was tried'}")
    arms = {name: [Path(arm["base"]).name, *arm["overrides"]] for name, arm in results.arms.items()}
    return render(
        path,
        title=f"Study {results.study}",
        about=f"{results.tested} against {results.reference} and others, evaluated without memory.",
        facts={"command": results.command, "commit": ", ".join(results.commits), **results.facts},
        warnings=_warnings(results),
        tables=tables(results),
        figures=figures(results),
        source=f"{results.command} · commit {', '.join(results.commits)}",
        configurations=arms,
    )


def render(path: Path, **values: Any) -> Path:
    """Write `study.html.jinja` filled with `values`; text is never markup."""
    write_atomically(path, filled("empo2_jax.study", "study.html.jinja", **values))
    return path


def _warnings(results: Results) -> list[str]:
    found = [f"Missing: {reason}" for reason in results.failed]
    if len(results.commits) > 1:
        found.append(f"Runs of {len(results.commits)} commits are compared: {', '.join(results.commits)}.")
    if dirty := [commit for commit in results.commits if commit.endswith("-dirty")]:
        found.append(f"Code that was changed after its commit: {', '.join(dirty)}.")
    return found + continued(results) + tried(results)


def continued(results: Results) -> list[str]:
    """Which runs were begun by the code of other commits than the one that ended them."""
    found = []
    for row in results.rows:
        if earlier := row.get("earlier_commits"):
            name = f"{row['arm']}, seed {row['seed']}" if len(results.of(row["arm"])) > 1 else row["arm"]
            found.append(f"{name} was begun by other code and continued: {earlier}.")
    return found


def tried(results: Results) -> list[str]:
    """What has to be said of scores that are no evaluation of a trained policy."""
    names = [name for name in results.names if any(row["protocol"] == TRIED for row in results.of(name))]
    return [f"{name}: the score is that of its last trial, which has seen test rewards." for name in names]


def figures(results: Results) -> list[Figure]:
    """All figures that the rows have numbers for."""
    scores = {name: results.score(name) for name in results.names}
    against = {name: results.difference(name) for name in results.names if name != results.tested}
    dots = {name: (e.value, e.low, e.high) for name, e in scores.items()}
    gaps = {f"{results.tested} − {name}": (e.value, e.low, e.high) for name, e in against.items() if e}
    mean = "Mean over seeds"
    made = [
        _dots("Scores", "Interquartile mean, 95 % interval, points; without memory.", dots, zero=False),
        _dots("What each change costs", "Mean paired difference over seeds, 95 % interval, points.", gaps, zero=True),
        _curves(results, "Learning curves", "Panel without memory, points: interquartile mean, 95 % interval.", _panel),
        _curves(results, "Training score", "Training episodes, points: interquartile mean, 95 % interval.", _training),
        _lines(results, "Score against wall time", f"{mean}: panel without memory, points.", _timed, "minutes"),
        _lines(results, "Entropy", f"{mean}, nats per token.", _entropy, "iteration"),
        _lines(results, "Adaptation", f"{mean}, points of each trial; weights fixed, memory on.", _adaptation, "trial"),
        _lines(results, "Best adaptation", f"{mean}: the best episodes of the trials so far.", _best, "trial"),
    ]
    return [figure for figure in made if figure]


def _dots(title: str, note: str, rows: Mapping[str, tuple[float, float, float]], zero: bool) -> Figure | None:
    svg = interval_chart(title, rows, zero)
    cells = [[name, *map(number_text, row)] for name, row in rows.items()]
    return Figure(title, note, svg, Table(title, note, ["", "value", "low", "high"], cells)) if svg else None


def _curves(results: Results, title: str, note: str, points: Callable[[Record], Curve]) -> Figure | None:
    """Interquartile mean over seeds with its interval, where every seed has a value."""
    lines, bands, cells = {}, {}, []
    for name in results.names:
        estimates = {x: bootstrap([ys], 1000) for x, ys in _gathered(results.of(name), points).items()}
        lines[name] = [(x, e.value) for x, e in estimates.items()]
        bands[name] = [(x, e.low, e.high) for x, e in estimates.items()]
        cells += [[name, *map(number_text, (x, e.value, e.low, e.high))] for x, e in estimates.items()]
    svg = line_chart(title, lines, "iteration", bands)
    return (
        Figure(title, note, svg, Table(title, note, ["arm", "iteration", "value", "low", "high"], cells))
        if svg
        else None
    )


def _lines(results: Results, title: str, note: str, points: Callable[[Record], Curve], x_label: str) -> Figure | None:
    lines = {}
    for name in results.names:
        curves = [list(points(row)) for row in results.of(name)]
        length = min(map(len, curves))  # place by place: times differ from run to run
        lines[name] = [(fmean(c[n][0] for c in curves), fmean(c[n][1] for c in curves)) for n in range(length)]
    svg = line_chart(title, lines, x_label)
    cells = [[name, number_text(x), number_text(y)] for name, line in lines.items() for x, y in line]
    return Figure(title, note, svg, Table(title, note, ["arm", x_label, "value"], cells)) if svg else None


def _gathered(rows: Sequence[Record], points: Callable[[Record], Curve]) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for row in rows:
        for x, y in points(row):
            found.setdefault(x, []).append(y)
    return {x: ys for x, ys in sorted(found.items()) if len(ys) == len(rows)}


def _panel(row: Record) -> Curve:
    return [(float(iteration), float(score)) for iteration, score, _ in row["panel"]]


def _training(row: Record) -> Curve:
    return [(float(iteration), float(score)) for iteration, score, _, _ in row["training"]]


def _timed(row: Record) -> Curve:
    return [(seconds / 60, float(score)) for _, score, seconds in row["panel"]]


def _entropy(row: Record) -> Curve:
    return [(float(iteration), entropy) for iteration, _, entropy, _ in row["training"] if entropy is not None]


def _adaptation(row: Record, curve: str = "score") -> Curve:
    return [(float(trial), float(points)) for trial, points in enumerate(row.get("adaptation", {}).get(curve, ()), 1)]


def _best(row: Record) -> Curve:
    return _adaptation(row, "best")
