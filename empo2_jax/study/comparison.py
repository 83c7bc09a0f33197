"""`empo2 report RUN1 RUN2 …`: runs side by side on one page. Unequal panels are refused, unequal commits marked.

Adaptations of unequal problems are left out and that is said; the evaluations of such runs still compare.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empo2_jax.config import Config
from empo2_jax.config_file import load_config
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.metrics import ADAPTATIONS_FILE, Record, read_metrics
from empo2_jax.report.marks import unfinished
from empo2_jax.run_record import CONFIG_FILE, identity, origin, read_facts
from empo2_jax.study.base import check_same_panel, settings
from empo2_jax.study.page import figures, render
from empo2_jax.study.remarks import continued, tried
from empo2_jax.study.results import Results
from empo2_jax.study.rows import EVALUATED
from empo2_jax.study.runs import row_of
from empo2_jax.study.tables import Table, cost, marked, tasks, tried_note


def compare_runs(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of several runs to `path` and return it.

    Raises:
        ConfigError: a run is named twice, or runs are evaluated on different panels or problems.
        DataError: a folder is no run, or lacks numbers; names it.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("report: a run is named twice; different ones are allowed")
    names = _names(folders)
    configs = {name: _config(folder) for name, folder in names.items()}
    first = next(iter(names))
    check_same_panel({name: identity(config) for name, config in configs.items()}, first, "report")
    rows: list[Record] = [{"arm": name, "seed": 0, **row_of(folder)} for name, folder in names.items()]
    _check_same_problems(rows)
    remarks = _failed_adaptations(rows, names)
    if len({row["adaptation"]["panel"] for row in rows if "adaptation" in row}) > 1:
        rows = [{key: value for key, value in row.items() if key != "adaptation"} for row in rows]
        remarks.append("The newest adaptations played other problems or began otherwise; they are left out.")
    arms: dict[str, Record] = {name: {"base": "", "overrides": [], "config": {}} for name in names}
    results = Results("runs", first, list(names)[1], "", {}, arms, rows, [])
    facts = {name: read_facts(folder) for name, folder in names.items()}
    return render(
        path,
        title="Runs side by side",
        about=f"{', '.join(names)}; one run each, so that no interval can be given.",
        facts={f"commit of {row['arm']}": row["commit"] or "unknown" for row in rows},
        warnings=[*_warnings(rows), *_unfinished(names, configs), *remarks, *continued(results), *tried(results)],
        tables=[
            _scores(results),
            *([tasks(results)] if len(rows[0]["tasks"]) > 1 else []),
            _keys(configs),
            cost(results),
        ],
        figures=[figure for figure in figures(results) if figure.title != "What each change costs"],
        source=f"empo2 report {' '.join(map(str, folders))} · commit {', '.join(results.commits)}",
        configurations={name: _origin(folder, facts[name]) for name, folder in names.items()},
    )


def _names(folders: Sequence[Path]) -> dict[str, Path]:
    """Short names: the last parts of the paths, as many as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, folders, strict=True))


def _config(folder: Path) -> Config:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise DataError(f"{folder}: not a run directory (no {CONFIG_FILE})")
    return load_config(path)


def _check_same_problems(rows: Sequence[Record]) -> None:
    """Equal configurations play other problems where their data changed."""
    for row in rows:
        if row["problems"] != rows[0]["problems"]:
            raise ConfigError(
                f"report: {row['arm']} and {rows[0]['arm']} played different problems in their last evaluations; "
                "equal ones are allowed"
            )


def _failed_adaptations(rows: Sequence[Record], names: Mapping[str, Path]) -> list[str]:
    return [
        f"{name}: the newest adaptation is left out, since episodes of it failed."
        for (name, folder), row in zip(names.items(), rows, strict=True)
        if (file := folder / ADAPTATIONS_FILE).is_file() and file.stat().st_size and "adaptation" not in row
    ]


def _warnings(rows: Sequence[Record]) -> list[str]:
    found = []
    commits = list(dict.fromkeys(row["commit"] or "unknown" for row in rows))
    if len(commits) > 1:
        found.append(f"The runs are of different commits: {', '.join(commits)}. Their differences may be the code's.")
    places = {row["arm"]: row["panel"][-1][0] for row in rows if row["protocol"] == EVALUATED}
    if len(set(places.values())) > 1:
        text = ", ".join(f"{name} after {place}" for name, place in places.items())
        found.append(f"Last evaluations after unequal numbers of iterations: {text}.")
    return found


def _unfinished(names: Mapping[str, Path], configs: Mapping[str, Config]) -> list[str]:
    places = {name: unfinished(configs[name], read_metrics(folder)) for name, folder in names.items()}
    return [f"{name} is not finished: {place}." for name, place in places.items() if place]


def _scores(results: Results) -> Table:
    cells = []
    for row in results.rows:
        place = f"{'iteration' if row['protocol'] == EVALUATED else 'trial'} {row['panel'][-1][0]}"
        cells.append([marked(results, row["arm"]), place, f"{row['score']:.1f}", f"{100 * row['success']:.1f}"])
    note = f"Last evaluation without memory: score in points, success in %.{tried_note(results)}"
    return Table("Scores", note, ["run", "evaluated at", "score", "success"], cells)


def _keys(configs: dict[str, Config]) -> Table:
    """Every key that reaches the numbers and differs."""
    flat = [settings(config) for config in configs.values()]
    keys = [key for key in flat[0] if any(other[key] != flat[0][key] for other in flat)]
    note = "Keys of the configuration that differ and reach the numbers."
    return Table("Changed keys", note, ["key", *configs], [[key, *(str(other[key]) for other in flat)] for key in keys])


def _origin(folder: Path, facts: dict[str, Any]) -> list[str]:
    forked = origin(folder)
    lines = [str(folder / CONFIG_FILE), str(facts.get("command", "")), f"forked from {forked}" if forked else ""]
    return [line for line in lines if line]
