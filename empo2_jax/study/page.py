"""One self-contained HTML page: of a study from its results file, or of several runs beside each other.

It needs no network and no script. Every figure names the command, commit and configurations behind it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from empo2_jax.charts import interval_chart, line_chart, number_text
from empo2_jax.errors import DataError
from empo2_jax.metrics import Record, write_atomically
from empo2_jax.report.template import filled
from empo2_jax.study.remarks import remarks
from empo2_jax.study.results import Results
from empo2_jax.study.statistics import bootstrap
from empo2_jax.study.tables import Table, marked, tables, tried_note

PAGE_FILE = "study.html"
Curve = Sequence[tuple[float, float]]
Rows = Mapping[str, Sequence[Record]]  # by arm
Drawn = Callable[[Record], Curve]
MOST_LINES = 8  # in a picture


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
        warnings=remarks(results),
        tables=tables(results),
        figures=figures(results),
        source=f"{results.command} · commit {', '.join(results.commits)}",
        configurations=arms,
    )


def render(path: Path, **values: Any) -> Path:
    """Write `study.html.jinja` filled with `values`; text is never markup."""
    write_atomically(path, filled("empo2_jax.study", "study.html.jinja", **values))
    return path


def figures(results: Results) -> list[Figure]:
    """All figures that the rows have numbers for; curves over iterations are those of arms that were evaluated."""
    mark = tried_note(results)
    scores = {name: results.score(name) for name in results.names}
    against = {name: results.difference(name) for name in results.names if name != results.tested}
    dots = {marked(results, name): (e.value, e.low, e.high) for name, e in scores.items()}
    gaps = {marked(results, name): (e.value, e.low, e.high) for name, e in against.items() if e}
    less = f"{results.tested} less the arm: mean paired difference over seeds, 95 % interval, points.{mark}"
    made = [
        _dots("Scores", f"Interquartile mean, 95 % interval, points; without memory.{mark}", dots, zero=False),
        _dots("What each change costs", less, gaps, zero=True),
    ]
    whole = {name: results.of(name) for name in results.names}
    chosen = {name: rows for name, rows in whole.items() if name not in results.tried}
    for title, note, points, x_label in BANDED:
        made += [_curves(rows, name, note, points, x_label) for name, rows in _parts(results, chosen, title, points)]
    for title, note, points, x_label in LINES:
        arms = whole if x_label == "trial" else chosen
        made += [_lines(rows, name, note, points, x_label) for name, rows in _parts(results, arms, title, points)]
    return [figure for figure in made if figure]


def _parts(results: Results, arms: Rows, title: str, points: Drawn) -> list[tuple[str, Rows]]:
    """Titles with the arms that are drawn under them: few enough to be told apart.

    The tested arm and the reference are in each picture, and arms whose names begin alike stay together if they can.
    """
    drawn = {name: rows for name, rows in arms.items() if any(points(row) for row in rows)}
    if len(drawn) <= MOST_LINES:
        return [(title, drawn)]
    always = [name for name in dict.fromkeys((results.tested, results.reference)) if name in drawn]
    room, pictures = MOST_LINES - len(always), [[]]
    for _, group in groupby((name for name in drawn if name not in always), lambda name: name.partition("_")[0]):
        alike = list(group)
        if len(pictures[-1]) + len(alike) > room:
            pictures.append([])
        for name in alike:
            if len(pictures[-1]) == room:
                pictures.append([])
            pictures[-1].append(name)
    chosen = [{name: drawn[name] for name in (*always, *names)} for names in pictures if names]
    return [(f"{title}, {number} of {len(chosen)}", rows) for number, rows in enumerate(chosen, 1)]


def _dots(title: str, note: str, rows: Mapping[str, tuple[float, float, float]], zero: bool) -> Figure | None:
    svg = interval_chart(title, rows, zero)
    cells = [[name, *map(number_text, row)] for name, row in rows.items()]
    return Figure(title, note, svg, Table(title, note, ["", "value", "low", "high"], cells)) if svg else None


def _curves(arms: Rows, title: str, note: str, points: Drawn, x_label: str) -> Figure | None:
    """Interquartile mean over seeds with its interval, where every seed has a value."""
    lines, bands, cells = {}, {}, []
    for name, rows in arms.items():
        estimates = {x: bootstrap([ys], 1000) for x, ys in _gathered(rows, points).items()}
        lines[name] = [(x, e.value) for x, e in estimates.items()]
        bands[name] = [(x, e.low, e.high) for x, e in estimates.items()]
        cells += [[name, *map(number_text, (x, e.value, e.low, e.high))] for x, e in estimates.items()]
    svg = line_chart(title, lines, x_label, bands)
    return (
        Figure(title, note, svg, Table(title, note, ["arm", x_label, "value", "low", "high"], cells)) if svg else None
    )


def _lines(arms: Rows, title: str, note: str, points: Drawn, x_label: str) -> Figure | None:
    lines = {}
    for name, rows in arms.items():
        curves = [list(points(row)) for row in rows]
        length = min(map(len, curves))  # place by place: times differ from run to run
        lines[name] = [(fmean(c[n][0] for c in curves), fmean(c[n][1] for c in curves)) for n in range(length)]
    svg = line_chart(title, lines, x_label)
    cells = [[name, number_text(x), number_text(y)] for name, line in lines.items() for x, y in line]
    return Figure(title, note, svg, Table(title, note, ["arm", x_label, "value"], cells)) if svg else None


def _gathered(rows: Sequence[Record], points: Drawn) -> dict[float, list[float]]:
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


# Title, note, points of a row, label of the horizontal axis: over all seeds with an interval, or as a mean alone.
BANDED: tuple[tuple[str, str, Drawn, str], ...] = (
    ("Learning curves", "Panel without memory, points: interquartile mean, 95 % interval.", _panel, "iteration"),
    ("Training score", "Training episodes, points: interquartile mean, 95 % interval.", _training, "iteration"),
)
LINES: tuple[tuple[str, str, Drawn, str], ...] = (
    ("Score against wall time", "Mean over seeds: panel without memory, points.", _timed, "minutes"),
    ("Entropy", "Mean over seeds, nats per token.", _entropy, "iteration"),
    ("Adaptation", "Mean over seeds, points of each trial; weights fixed, memory on.", _adaptation, "trial"),
    ("Best adaptation", "Mean over seeds: the best episodes of the trials so far.", _best, "trial"),
)
