"""One run of a study: its processes, and the row of numbers that is left of it."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from empo2_jax.errors import DataError
from empo2_jax.metrics import ADAPTATIONS_FILE, EVALUATIONS_FILE, Record, read_jsonl, read_metrics
from empo2_jax.panels import load_panel
from empo2_jax.records import Adapted, Evaluated
from empo2_jax.report.marks import alike, asked
from empo2_jax.report.parts import is_number
from empo2_jax.run_record import read_facts
from empo2_jax.study.base import STARTS, Cell
from empo2_jax.study.rows import EVALUATED, SPENT, TRIED, Row, checked, problems_key


def train_command(cell: Cell, folder: Path) -> list[str]:
    """Arguments of `empo2` that make the run; equal warm starts of a study are made once."""
    command = ["train", str(cell.arm.base)]
    for override in cell.arm.overrides:
        key, _, text = override.partition("=")
        value = json.loads(text)
        command += [f"--{key}", value if isinstance(value, str) else text]
    warmstart = cell.arm.config(cell.seed).warmstart
    if warmstart.updates and not warmstart.shared_dir:
        command += ["--warmstart.shared_dir", str(folder.parents[1] / STARTS)]
    return [*command, "--run.seed", str(cell.seed), "--run.dir", str(folder), "--run.tensorboard", "false"]


def adapt_command(cell: Cell, folder: Path) -> list[str]:
    """Arguments of `empo2` that adapt the policy of the run."""
    panel = ["--panel", str(cell.panel)] if cell.panel else []
    return ["adapt", str(folder), "--trials", str(cell.trials), *panel]


def share_cores(jobs: int) -> Callable[[], None]:
    """What each of `jobs` threads calls first, so that processes started by it have an equal part of the cores.

    XLA, BLAS and simulators start a thread per core that they see; those of several runs would wait for each other.
    Threads that are more than the cores share them in turn. Nothing is done on systems other than Linux.
    """
    if sys.platform != "linux":
        return lambda: None
    cores, numbers = sorted(os.sched_getaffinity(0)), count()

    def take() -> None:
        job = next(numbers)
        part = cores[job * len(cores) // jobs : (job + 1) * len(cores) // jobs]
        os.sched_setaffinity(0, part or [cores[job % len(cores)]])  # of this thread, and handed on to its processes

    return take


class Processes:
    """The `empo2` processes of a study: started from several threads, ended together."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock, self._stopped = threading.Lock(), False

    def run(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Run one command to its end; its exit code and what it said on standard error."""
        command = [sys.executable, "-m", "empo2_jax", *arguments]
        with self._lock:
            if self._stopped:
                return 143, "stopped"
            null = subprocess.DEVNULL
            process = subprocess.Popen(command, text=True, stdin=null, stdout=null, stderr=subprocess.PIPE)
            self._running.add(process)
        _, errors = process.communicate()
        with self._lock:
            self._running.discard(process)
        return process.returncode, errors

    def stop(self) -> None:
        """Ask all to stop; a run saves what is complete."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()


def run_cell(cell: Cell, folder: Path, processes: Processes) -> Record:
    """Train (or continue) in `folder`, adapt where that is wanted, and return the row.

    Raises:
        DataError: a process failed, or left too little or more than was asked for; the message names the run.
    """
    _empo2(cell, train_command(cell, folder), processes)
    if cell.trials and not _adapted(cell, folder):
        _empo2(cell, adapt_command(cell, folder), processes)
        if not _adapted(cell, folder):
            raise DataError(
                f"{cell}: {folder}: the newest adaptation is not the one that is asked for, or episodes of it failed"
            )
    try:
        row = row_of(folder)
    except DataError as error:
        raise DataError(f"{cell}: {error}") from None
    most, _ = asked(cell.arm.config(cell.seed))
    if len(row["training"]) > most:  # a longer study was here before
        raise DataError(f"{cell}: {folder} went on to {len(row['training'])}, but {most} is asked for; remove it")
    return {"arm": cell.arm.name, "seed": cell.seed, "fingerprint": cell.fingerprint(), **row}


def _empo2(cell: Cell, arguments: Sequence[str], processes: Processes) -> None:
    code, errors = processes.run(arguments)
    if code:
        reason = (errors.strip().splitlines() or [f"exit code {code}"])[-1].removeprefix("error: ")
        raise DataError(f"{cell} failed: {reason}")


def row_of(folder: Path) -> Record:
    """What a finished run says, read from its files.

    `score` (points), `success` (share) and `tasks` (points by task) are those of its last evaluation without memory, or
    of its last trial where `protocol` is `trials`, and `problems` names what it played; `panel` has one [iteration,
    points, seconds] per evaluation that compares with the last one, `training` one [iteration, points, entropy in nats
    or None, seconds] per iteration, seconds counted from the start; `memory_share` is that of the rollout time, None if
    unknown; `adaptation` has the curves of the newest adaptation, if no episode of it failed, and names what it played;
    `earlier_commits` is there if other code began the run.

    Raises:
        DataError: a file or a number is missing or wrong, or the last evaluation is incomplete; names it.
    """
    metrics, evaluations = read_metrics(folder), _evaluations(folder)
    last = evaluations[-1]
    if not last["complete"]:
        raise DataError(f"{folder}: episodes of the last evaluation failed: its score is of a part")
    panel = {line["iteration"]: line["score"] for line in alike(evaluations)}  # at 0 that after the warm start
    spent, seconds, training = 0.0, {0: 0.0}, []
    for record in metrics:
        spent += _number(folder, record, "timing_s/iteration")
        seconds[record["iteration"]] = spent
        score, entropy = _number(folder, record, "episode/score"), record.get("actor/entropy")
        nats = round(entropy, 4) if isinstance(entropy, float) else None
        training.append([record["iteration"], round(score, 3), nats, round(spent, 1)])
    facts = read_facts(folder)
    row = {
        "commit": facts.get("commit", ""),
        **{key: facts[key] for key in ("earlier_commits",) if key in facts},
        "protocol": last["protocol"],
        "score": last["score"],
        "success": last["success"],
        "tasks": task_scores(last),
        "problems": problems_key(last["split"], problems=_played(last)),
        "panel": [[at, score, round(seconds.get(at, 0.0), 1)] for at, score in panel.items()],
        "training": training,
        "updates": sum(_number(folder, record, "actor/updates") for record in metrics),
        "seconds": training[-1][3] if training else 0.0,
        "memory_share": _memory_share(metrics),
        **{key: _number(folder, metrics[-1], f"total/{key}") if metrics else 0.0 for key in SPENT},
        **_adaptation(folder),
    }
    return checked(Row, row, str(folder))


def _evaluations(folder: Path) -> list[Record]:
    """Evaluations of a trained policy; where nothing is trained (Reflexion), one per trial on the panel."""
    file = folder / EVALUATIONS_FILE
    if lines := _lines(file, Evaluated):
        return [line | {"protocol": EVALUATED} for line in lines]
    record = _adaptation_record(folder)
    if record is None:
        raise DataError(f"{file}: no evaluation")
    return [
        {
            "protocol": TRIED,
            "iteration": place + 1,
            "split": record["split"],
            "score": score,
            "success": record["success"][place],
            "complete": all(row["scores"][place] is not None for row in record["rows"]),
            "rows": [row | {"scores": row["scores"][place : place + 1]} for row in record["rows"]],
        }
        for place, score in enumerate(record["score"])
    ]


def _lines(file: Path, shape: Any) -> list[Record]:
    """The lines of a log, [] without it."""
    return read_jsonl(file, shape) if file.is_file() else []


def _adaptation_record(folder: Path) -> Record | None:
    """The newest one."""
    return next(reversed(_lines(folder / ADAPTATIONS_FILE, Adapted)), None)


def _played(line: Record) -> set[tuple[str, int]]:
    """The problems of an evaluation or adaptation."""
    return {(row["task"], row["variation"]) for row in line["rows"]}


def _memory_share(metrics: Sequence[Record]) -> float | None:
    """Share of the rollout time that memory took; None where the run does not say."""
    pairs = [(record.get("timing_s/memory_in_rollout"), record.get("timing_s/rollout")) for record in metrics]
    known = [(memory, rollout) for memory, rollout in pairs if is_number(memory) and is_number(rollout)]
    whole = sum(rollout for _, rollout in known)
    return sum(memory for memory, _ in known) / whole if whole and len(known) == len(metrics) else None


def task_scores(evaluation: Record) -> dict[str, float]:
    """Points by task of an evaluation: means over repeats, then variations."""
    cells: dict[str, list[float]] = {}
    for row in evaluation["rows"]:
        cells.setdefault(row["task"], []).append(fmean(row["scores"]))
    return {task: fmean(values) for task, values in cells.items()}


def _adaptation(folder: Path) -> dict[str, Any]:
    record = _adaptation_record(folder)
    if record is None or not record["complete"]:
        return {}
    panel = problems_key(record["split"], record["memory"], problems=_played(record))
    return {"adaptation": {"score": record["score"], "best": record["best_score"], "panel": panel}}


def _adapted(cell: Cell, folder: Path) -> bool:
    """Whether the newest adaptation is what the cell asks for: of the trained policy, without memory, on its panel."""
    record, evaluations = _adaptation_record(folder), _lines(folder / EVALUATIONS_FILE, Evaluated)
    if record is None or not evaluations or not record["complete"]:
        return False
    split, problems = evaluations[-1]["split"], _played(evaluations[-1])
    if cell.panel:
        panel = load_panel(cell.panel)
        split, problems = panel.split, {(name, one) for name, numbers in panel.tasks.items() for one in numbers}
    found = (record["iteration"], len(record["score"]), record["memory"], record["split"], _played(record))
    return found == (cell.arm.config(cell.seed).run.iterations, cell.trials, "empty", split, problems)


def _number(folder: Path, record: Record, key: str) -> float:
    value = record.get(key)
    if isinstance(value, int | float):
        return float(value)
    raise DataError(f"{folder}: iteration {record['iteration']} has no number `{key}` in metrics.jsonl")
