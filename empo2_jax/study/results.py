"""The results file of a study: numbers of every run with the commit and configuration behind them, and its check.

Committed results are such a file. `differences` says where fresh results do not reproduce committed ones.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from empo2_jax.errors import ConfigError, DataError
from empo2_jax.metrics import Record, write_atomically
from empo2_jax.panels import load_panel
from empo2_jax.readers import read_json
from empo2_jax.study.base import Cell, Study, check_same_panel, completed, fingerprint, settings
from empo2_jax.study.rows import TRIED, ResultsFile, checked
from empo2_jax.study.statistics import Estimate, bootstrap, by_stratum, interquartile_mean, paired_interval

FORMAT = 1
RESULTS_FILE = "results.json"
LEAST_SEEDS = 3  # of a check: fewer have no interval worth the name
BySeed = Mapping[int, Record]  # rows of one arm
_SLACK = 1e-6  # points; sums in another order


@dataclass(frozen=True)
class Results:
    """All that is known of a study."""

    study: str
    tested: str
    reference: str
    command: str
    facts: dict[str, str]  # when, where, with which versions
    arms: dict[str, Record]  # name to base, overrides and config (section.key to value, without the seed)
    rows: list[Record]  # as `runs.row_of` made them, with arm and seed
    failed: list[str]  # runs without a row, and why

    def of(self, arm: str) -> list[Record]:
        """Rows of an arm by seed."""
        return sorted((row for row in self.rows if row["arm"] == arm), key=lambda row: row["seed"])

    @property
    def names(self) -> list[str]:
        """Arms with rows, in the order of the study."""
        return [name for name in self.arms if self.of(name)]

    @property
    def tried(self) -> list[str]:
        """Arms whose score is that of the last trial on the panel: nothing was trained, and test rewards were seen."""
        return [name for name in self.names if any(row["protocol"] == TRIED for row in self.of(name))]

    @property
    def commits(self) -> list[str]:
        """Of all code that made the rows, in their order; one, where nothing was changed in between."""
        made = (f"{row.get('earlier_commits', '')}, {row['commit'] or 'unknown'}".split(", ") for row in self.rows)
        return list(dict.fromkeys(name for names in made for name in names if name))

    def fingerprint_today(self, row: Record) -> str:
        """What `Cell.fingerprint` is for the same run, by today's code: keys added since have their defaults.

        A key that is gone since, or trials that are missing, make it that of no cell.
        """
        arm = self.arms[row["arm"]]
        trials = len(row["adaptation"]["score"]) if "adaptation" in row and row["protocol"] != TRIED else 0
        panel = [arm["adaptation_panel"]] if "adaptation_panel" in arm else []
        return fingerprint(completed(arm["config"]) | {"run.seed": row["seed"]}, trials, *panel)

    def score(self, arm: str) -> Estimate:
        """Interquartile mean of an arm's scores over seeds and tasks."""
        return bootstrap(by_stratum([row["tasks"] for row in self.of(arm)]))

    def difference(self, arm: str) -> Estimate | None:
        """Score of the tested arm less that of `arm`, over the seeds that both have; None without any."""
        first, second = ({row["seed"]: row["score"] for row in self.of(name)} for name in (self.tested, arm))
        seeds = sorted(first.keys() & second.keys())
        return paired_interval([first[s] for s in seeds], [second[s] for s in seeds]) if seeds else None

    @property
    def better(self) -> bool:
        """Whether the interval of the tested arm's difference from the reference lies above 0."""
        difference = self.difference(self.reference)
        return self.tested != self.reference and difference is not None and difference.low > 0


def collect(
    study: Study, cells: Sequence[Cell], rows: Sequence[Record], failed: Sequence[str], command: str
) -> Results:
    """Results from the rows of finished runs."""
    facts = {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: version(name) for name in ("empo2_jax", "jax", "numpy")},
    }
    arms = {cell.arm.name: _arm_record(cell) for cell in cells}
    arms = {name: arms[name] for name in study.arms if name in arms}
    return Results(study.name, study.tested, study.reference, command, facts, arms, list(rows), list(failed))


def _arm_record(cell: Cell) -> Record:
    arm, panel = cell.arm, {"adaptation_panel": load_panel(cell.panel).model_dump_json()} if cell.panel else {}
    config = {key: value for key, value in settings(arm.config(0)).items() if key != "run.seed"}
    return {"base": str(arm.base), "overrides": list(arm.overrides), "config": json.loads(json.dumps(config)), **panel}


def write_results(path: Path, results: Results) -> None:
    """Write a results file, one run a line."""
    head = {key: value for key, value in vars(results).items() if key not in ("rows", "arms")}
    text = json.dumps({"format": FORMAT, **head}, ensure_ascii=False, indent=1)[:-2]
    arms = ",\n".join(f"  {json.dumps(name)}: {_line(arm)}" for name, arm in results.arms.items())
    rows = ",\n".join(f"  {_line(row)}" for row in results.rows)
    write_atomically(path, f'{text},\n "arms": {{\n{arms}\n }},\n "rows": [\n{rows}\n ]\n}}\n')


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_results(path: Path) -> Results:
    """Read a results file.

    Raises:
        DataError: it is none, of another format, or says what cannot be; names the place.
        ConfigError: arms that are evaluated on different panels.
    """
    values = read_json(path, dict[str, Any])
    if values.pop("format", None) != FORMAT:
        raise DataError(f"{path}: not the results of a study in format {FORMAT}")
    results = Results(**checked(ResultsFile, values, f"{path}: not the results of a study"))
    seen: set[tuple[str, int]] = set()
    for place, row in enumerate(results.rows):
        arm, seed = row["arm"], row["seed"]
        if arm not in results.arms:
            raise DataError(f"{path}: rows[{place}].arm = {arm!r}: one of {', '.join(results.arms)} is allowed")
        if (arm, seed) in seen:
            raise DataError(f"{path}: rows[{place}] is a second one of arm {arm}, seed {seed}; one is allowed")
        if row["tasks"].keys() != results.rows[0]["tasks"].keys():
            raise DataError(f"{path}: rows[{place}] and rows[0] have scores of different tasks; equal ones are allowed")
        seen.add((arm, seed))
    if results.arms:
        check_same_panel({n: arm["config"] for n, arm in results.arms.items()}, next(iter(results.arms)), str(path))
    return results


def differences(committed: Results, fresh: Results, left_out: Sequence[str] = ()) -> list[str]:
    """Where fresh results do not reproduce committed ones, one cell a line; [] if they do.

    A cell is an arm and a quantity (score, success, points of the last adaptation trial and of the best episodes of all
    trials): its interquartile mean over the seeds that were run must lie within the interval of the committed runs with
    the same seeds. What the committed results have and the fresh ones lack is a difference, too, except for arms that
    were `left_out` on purpose and for seeds that no arm was run with.
    """
    found = [f"not run: {reason}" for reason in fresh.failed]
    seeds = {row["seed"] for row in fresh.rows}
    missing = [arm for arm in committed.names if arm not in fresh.names and arm not in left_out]
    found += [f"{arm}: the committed results have it, and no run of it is there" for arm in missing]
    for arm, record in fresh.arms.items():
        if change := _change(committed, arm, record["config"]):
            found.append(change)
        if arm in committed.arms and arm in fresh.names:
            before, now = ({row["seed"]: row for row in results.of(arm)} for results in (committed, fresh))
            found += [f"{arm}: seed {seed} was not run" for seed in sorted(before.keys() & seeds - now.keys())]
            found += _arm_differences(arm, before, now)
    return found


def check_comparable(committed: Results, cells: Sequence[Cell], option: str) -> None:
    """Raise `ConfigError` where no arm of these runs has its committed configuration: nothing could be reproduced."""
    records = {cell.arm.name: _arm_record(cell) for cell in cells}
    changes = [_change(committed, arm, record["config"]) for arm, record in records.items()]
    if all(changes):
        raise ConfigError(f"{option}: {changes[0]}")


def _change(committed: Results, arm: str, config: Record) -> str:
    if arm not in committed.arms:
        return f"{arm}: no such arm in the committed results"
    old = completed(committed.arms[arm]["config"])
    changed = [f"{key} was {old.get(key)!r}, is {now!r}" for key, now in config.items() if old.get(key) != now]
    return f"{arm}: another configuration: {'; '.join(changed[:3])}" if changed else ""


def _arm_differences(arm: str, committed: BySeed, fresh: BySeed) -> list[str]:
    if unknown := sorted(fresh.keys() - committed.keys()):
        return [f"{arm}: the committed results lack seed {unknown[0]}"]
    same = {seed: committed[seed] for seed in fresh}
    rows = (*same.values(), *fresh.values())
    if any(row["tasks"].keys() != rows[0]["tasks"].keys() for row in rows):
        return [f"{arm}: another panel: {', '.join(sorted(next(iter(fresh.values()))['tasks']))}"]
    if len({row["problems"] for row in rows if "problems" in row}) > 1:
        return [f"{arm}: other problems of these tasks were played"]
    curves = [row["adaptation"] for row in rows if "adaptation" in row]
    if len({curve["panel"] for curve in curves if curve.get("panel")}) > 1:
        return [f"{arm}: the adaptation played other problems or began otherwise"]
    if len({len(curve["score"]) for curve in curves}) > 1:
        return [f"{arm}: the adaptations have different numbers of trials"]
    found = []
    for key in ("problems", "adaptation"):
        if lost := [seed for seed, row in same.items() if key in row and key not in fresh[seed]]:
            found.append(f"{arm}: no {key} of seed {', '.join(map(str, lost))}, which the committed results have")
    adapted = [seed for seed, row in same.items() if "adaptation" in row and "adaptation" in fresh[seed]]
    before = _quantities(same, adapted)
    for quantity, now in _quantities(fresh, adapted).items():
        known, value = bootstrap(before[quantity]), interquartile_mean(now)
        if not known.low - _SLACK <= value <= known.high + _SLACK:
            found.append(f"{arm}, {quantity}: {value:.2f} is outside of {known.low:.2f} to {known.high:.2f}")
    return found


def _quantities(rows: BySeed, adapted: Sequence[int]) -> dict[str, list[list[float]]]:
    """Values by stratum; those of adaptations are of the seeds `adapted`."""
    scores, success = by_stratum([row["tasks"] for row in rows.values()]), [row["success"] for row in rows.values()]
    quantities = {"score": scores, "success": [success]}
    if adapted:
        curves = [rows[seed]["adaptation"] for seed in adapted]
        quantities["last adaptation trial"] = [[curve["score"][-1] for curve in curves]]
        quantities["adaptation"] = [[curve["best"][-1] for curve in curves]]
    return quantities
