"""Results as a table for the terminal and as JSON."""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from empo2_jax.bench.base import Measured, Peaks, Result
from empo2_jax.bench.goals import Verdict

_PACKAGES = ("jax", "jaxlib", "numpy", "torch", "transformers")


def show(results: Sequence[Result], verdicts: Sequence[Verdict], peaks: Peaks, cores: Sequence[int]) -> None:
    """Print the table, then every goal that is not met and how many are."""
    console = Console()
    table = Table("case", "ours", "peer", "ratio", "limit", "share", "equal?", title="empo2 bench", show_lines=True)
    for result in results:
        limit, ours = result.limit(peaks), result.ours
        share = f"{limit / ours.seconds('wall'):.0%}" if limit and ours and ours.samples else "—"
        bound = f"{_seconds(limit)}/{result.case.unit}" if limit else "—"
        peer = _side(result.peer, result.case.unit) if result.case.peer else "none"
        table.add_row(
            result.case.name, _side(ours, result.case.unit), peer, _ratio(result), bound, share, _equality(result)
        )
    console.print(table)
    for result in results:
        if rows := grid(result.figures()):
            console.print(_grid_table(result.case.name, rows))
    console.print(
        f"cores {', '.join(map(str, cores))} · {peaks.flops / 1e9:.0f} GFLOP/s (f32), "
        f"{peaks.bandwidth / 1e9:.1f} GB/s · load average {max((max(r.load) for r in results), default=0.0):.1f} "
        "· ratios: median [smallest, largest] of the pairs",
        markup=False,
    )
    for result in results:
        if result.problem:
            console.print(f"{result.case.name}: {result.problem}", markup=False)
    for verdict in verdicts:
        if not verdict.met:
            kind = "MISSED" if verdict.stable else "warning"
            kind = kind if verdict.adr is None else f"missed, see ADR {verdict.adr}"
            value = "not measured" if math.isnan(verdict.value) else f"{verdict.value:.4g}"
            console.print(f"{kind}: {verdict.case} {verdict.figure} {value}, goal {verdict.goal}", markup=False)
    console.print(f"{sum(verdict.met for verdict in verdicts)} of {len(verdicts)} goals met")


def brief(result: Result) -> str:
    """One line on one result."""
    if speed := result.speed("wall"):
        return f"{speed.median:.2f}× in wall-clock time"
    if result.problem:
        return result.problem
    return "NOT EQUAL" if result.equal is False else "done"


def record(
    results: Sequence[Result], verdicts: Sequence[Verdict], peaks: Peaks, cores: Sequence[int]
) -> dict[str, Any]:
    """Everything measured, for a file."""
    return {
        "machine": {
            "processor": platform.machine(),
            "cores": list(cores),
            "of": os.cpu_count(),
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in _PACKAGES},
            **peaks._asdict(),
        },
        "results": [
            {
                **asdict(result.case),
                "ours_measured": _plain(result.ours),
                "peer_measured": _plain(result.peer),
                "differences": dict(result.differences),
                "equal": result.equal,
                "problem": result.problem,
                "load": list(result.load),
                "figures": result.figures(),
                "wall_ratio_spread": result.speed("wall"),
                "cpu_ratio_spread": result.speed("cpu"),
            }
            for result in results
        ],
        "goals": [
            {
                **verdict._asdict(),
                "value": None if math.isnan(verdict.value) else verdict.value,
                "stable": verdict.stable,
            }
            for verdict in verdicts
        ],
    }


def grid(figures: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Figures whose names are `row/column`, by row and column; they make a table of their own."""
    rows: dict[str, dict[str, float]] = {}
    for name, value in figures.items():
        row, slash, column = name.partition("/")
        if slash:
            rows.setdefault(row, {})[column] = value
    return rows


def _grid_table(title: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    table = Table("", *columns, title=title)
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.4g}" if column in row else "—" for column in columns))
    return table


def _plain(side: Measured | None) -> dict[str, Any] | None:
    return side and {
        "samples": [sample._asdict() for sample in side.samples],
        "rss": side.rss,
        "figures": dict(side.figures),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _side(side: Measured | None, unit: str) -> str:
    if side is None:
        return "none (see below)"
    lines = []
    if side.samples:
        lines = [f"{_seconds(side.seconds('wall'))}/{unit}", f"{_seconds(side.seconds('cpu'))} of CPU"]
    lines += [f"{name} {value:.4g}" for name, value in side.figures.items() if "/" not in name]
    return "\n".join([*lines, f"{side.rss / 2**20:.0f} MiB peak"])


def _ratio(result: Result) -> str:
    lines = []
    for clock in ("wall", "cpu"):
        if speed := result.speed(clock):
            lines.append(f"{clock} {speed.median:.2f} [{speed.least:.2f}, {speed.most:.2f}]")
    more = {name: value for name, value in result.figures().items() if name.endswith("_ratio")}
    lines += [f"{name} {value:.2f}" for name, value in more.items() if name not in ("wall_ratio", "cpu_ratio")]
    if result.equal is False:
        lines.append("VOID")
    return "\n".join(lines) or "—"


def _equality(result: Result) -> str:
    if result.equal is None:
        return "—"
    details = [f"{name} {value:.1e}" for name, value in result.differences.items()]
    return "\n".join(["yes" if result.equal else "NO", *details])


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
