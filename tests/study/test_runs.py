"""The row of a run, read from its files."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from empo2_jax.cli import build_parser
from empo2_jax.config_options import config_of
from empo2_jax.errors import DataError
from empo2_jax.metrics import JsonLines, read_jsonl
from empo2_jax.run_record import identity
from empo2_jax.study.base import cells_of, load_study
from empo2_jax.study.runs import Processes, adapt_command, row_of, run_cell, share_cores, task_scores, train_command
from tests.fixtures.recorded import write_lines
from tests.fixtures.studies import make_adaptation, make_run, make_study


def test_the_row_of_a_run(tmp_path: Path) -> None:
    row = row_of(make_run(tmp_path / "run", 40.0, commit="abc"))
    assert (
        row["commit"] == "abc"
        and row["protocol"] == "evaluation"
        and row["score"] == 40.0
        and row["tasks"] == {"lamp": 40.0}
    )
    assert row["panel"] == [[0, 0.0, 0.0], [2, 40.0, 60.0]]
    assert row["training"] == [[1, 20.0, 1.5, 30.0], [2, 40.0, 1.5, 60.0]]
    assert row["updates"] == 8.0 and row["seconds"] == 60.0 and row["memory_share"] == 0.25
    assert row["tip_calls"] == 10.0 and "adaptation" not in row and "earlier_commits" not in row
    (tmp_path / "run/run.json").write_text('{"commit": "abc", "earlier_commits": "dead, beef"}')
    assert row_of(tmp_path / "run")["earlier_commits"] == "dead, beef"


def test_the_start_is_the_policy_after_the_warm_start(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 40.0)
    first, *others = read_jsonl(folder / "evaluations.jsonl")
    log = JsonLines(folder / "evaluations.jsonl", keep=0)
    for line in (first, first | {"score": 7.0}, *others):
        log.append(line)
    log.close()
    assert row_of(folder)["panel"] == [[0, 7.0, 0.0], [2, 40.0, 60.0]]


def test_the_newest_adaptation_is_part_of_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 40.0)
    file = folder / "adaptations.jsonl"
    file.touch()  # about to be written
    assert "adaptation" not in row_of(folder)
    write_lines(file, make_adaptation([5.0, 5.0]), make_adaptation([1.0, 0.0]))
    first = row_of(folder)["adaptation"]
    assert (first["score"], first["best"]) == ([1.0, 0.0], [1.0, 1.0])
    write_lines(file, make_adaptation([1.0, 0.0], memory="run"))
    assert row_of(folder)["adaptation"]["panel"] != first["panel"]
    write_lines(file, make_adaptation([1.0, 0.0]), make_adaptation([9.0, 9.0], complete=False))
    assert "adaptation" not in row_of(folder)  # a curve of a part is none


def test_trials_are_the_evaluation_where_nothing_is_trained(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 40.0)
    (folder / "evaluations.jsonl").unlink()
    rows = [
        {"task": "lamp", "variation": v, "scores": [first, 0.0, 30.0 + 20 * v]} for v, first in enumerate((0, None))
    ]
    record = make_adaptation([0.0, 0.0, 40.0], rows=rows, success=[0.0, 0.0, 0.5], complete=False)
    write_lines(folder / "adaptations.jsonl", record)
    row = row_of(folder)
    assert (row["protocol"], row["score"], row["success"], row["tasks"]) == ("trials", 40.0, 0.5, {"lamp": 40.0})
    assert row["panel"] == [[2, 0.0, 60.0], [3, 40.0, 0.0]]  # an episode of the first trial failed
    assert row["problems"] == row_of(make_run(tmp_path / "other", 40.0))["problems"]
    write_lines(
        folder / "adaptations.jsonl", record | {"rows": [row | {"scores": row["scores"][::-1]} for row in rows]}
    )
    with pytest.raises(DataError, match="episodes of the last evaluation failed"):
        row_of(folder)


def test_only_evaluations_that_compare_with_the_last_one_are_in_its_curve(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 40.0)
    first, last = read_jsonl(folder / "evaluations.jsonl")
    part, other = first | {"complete": False, "iteration": 1}, first | {"split": "dev", "iteration": 1}
    write_lines(folder / "evaluations.jsonl", first, part, other, last)
    assert row_of(folder)["panel"] == [[0, 0.0, 0.0], [2, 40.0, 60.0]]


def test_an_unknown_share_of_memory_is_no_number(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 40.0)
    text = (folder / "metrics.jsonl").read_text()
    for other in ("", '"timing_s/memory_in_rollout":"nan",'):
        (folder / "metrics.jsonl").write_text(text.replace('"timing_s/memory_in_rollout":5.0,', other, 1))
        assert row_of(folder)["memory_share"] is None


def test_the_command_of_a_run_makes_the_configuration_of_its_arm(tmp_path: Path) -> None:
    path = make_study(tmp_path)
    more = 'model.path = "Größe \\"a\\" \\\\ b"\nwarmstart.source = ["runs/ü", "gold"]\n'
    path.write_text(path.read_text() + more)
    for cell in cells_of(load_study(path), 2):
        config = config_of(build_parser().parse_args(train_command(cell, tmp_path / "run")))
        assert identity(config) == identity(cell.arm.config(cell.seed)) and config.run_dir == tmp_path / "run"
    assert config.model.path == 'Größe "a" \\ b'


class NoProcesses(Processes):
    """Remembers the commands; every one does nothing, well."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[str] = []

    def run(self, arguments: Sequence[str]) -> tuple[int, str]:
        self.commands.append(arguments[0])
        return 0, ""


def test_the_runs_of_a_study_share_their_warm_starts(tmp_path: Path) -> None:
    path = make_study(tmp_path)
    out = tmp_path / "study"
    assert not any("warmstart" in word for word in train_command(cells_of(load_study(path))[0], out / "new/seed0"))
    path.write_text(path.read_text().replace("[arms.new]", "[common]\nwarmstart.updates = 3\n[arms.new]"))
    new, old, *_ = cells_of(load_study(path))
    before = new.fingerprint()
    for cell, folder in ((new, out / "new/seed0"), (old, out / "old/seed0")):
        config = config_of(build_parser().parse_args(train_command(cell, folder)))
        assert config.warmstart.shared_dir == str(out / "starts")
        assert identity(config) == identity(cell.arm.config(cell.seed))
    path.write_text(path.read_text().replace("updates = 3", 'updates = 3\nwarmstart.shared_dir = "elsewhere"'))
    cell = cells_of(load_study(path))[0]
    assert cell.fingerprint() == before  # where a start lies reaches no number
    assert config_of(build_parser().parse_args(train_command(cell, out / "x/y"))).warmstart.shared_dir == "elsewhere"


def test_what_a_shorter_or_longer_study_left_is_not_taken_for_this_one(tmp_path: Path) -> None:
    path, folder, processes = make_study(tmp_path), make_run(tmp_path / "run", 40.0), NoProcesses()
    file, wanted = folder / "adaptations.jsonl", make_adaptation([1.0, 2.0], iteration=2)
    others = ({"iteration": 1}, {"memory": "run"}, {"split": "dev"}, {"rows": wanted["rows"][:1]}, {"complete": False})
    cell = replace(cells_of(load_study(path))[0], trials=2)
    for other in others:
        write_lines(file, wanted | other)
        with pytest.raises(
            DataError, match=r"arm new, seed 0: .*run: the newest adaptation is not .*, or episodes of it failed"
        ):
            run_cell(cell, folder, processes)
        assert processes.commands == ["train", "adapt"]
        processes.commands.clear()
    write_lines(file, *(wanted | other for other in others), wanted)
    assert run_cell(cell, folder, processes)["fingerprint"] == cell.fingerprint()
    assert processes.commands == ["train"]
    shorter = replace(cell, trials=0, arm=replace(cell.arm, overrides=("run.iterations=1",)))
    with pytest.raises(DataError, match=r"arm new, seed 0: .*run went on to 2, but 1 is asked for; remove it"):
        run_cell(shorter, folder, processes)


def test_a_policy_may_be_adapted_to_another_panel(tmp_path: Path) -> None:
    panel = tmp_path / "other.toml"
    panel.write_text('env = "toy"\nsplit = "dev"\nrepeats = 1\ntemperature = 0.4\nseed = 0\n[tasks]\nbulb = [6]\n')
    keys = 'adaptation_trials = 2\nadaptation_arms = ["new"]\n'
    plain, _, *_ = cells_of(load_study(make_study(tmp_path, keys)))
    cell, other, *_ = cells_of(load_study(make_study(tmp_path, f'{keys}adaptation_panel = "other.toml"\n')))
    assert (cell.panel, other.panel) == (panel, None) and cell.fingerprint() != plain.fingerprint()
    assert adapt_command(cell, tmp_path) == ["adapt", str(tmp_path), "--trials", "2", "--panel", str(panel)]
    assert adapt_command(plain, tmp_path) == ["adapt", str(tmp_path), "--trials", "2"]
    folder, processes = make_run(tmp_path / "run", 40.0), NoProcesses()
    write_lines(folder / "adaptations.jsonl", make_adaptation([1.0, 2.0]))
    with pytest.raises(DataError, match="the newest adaptation is not the one"):
        run_cell(cell, folder, processes)
    assert run_cell(plain, folder, processes)["adaptation"]["score"] == [1.0, 2.0]
    rows = [{"task": "bulb", "variation": 6, "scores": [3.0, 4.0]}]
    write_lines(folder / "adaptations.jsonl", make_adaptation([3.0, 4.0], split="dev", rows=rows))
    assert run_cell(cell, folder, processes)["adaptation"]["score"] == [3.0, 4.0]
    assert processes.commands == ["train", "adapt", "train", "train"]


def test_scores_of_tasks_are_means_over_repeats_then_variations() -> None:
    rows = [
        {"task": "a", "variation": 0, "scores": [0.0, 10.0]},
        {"task": "a", "variation": 1, "scores": [20.0]},
        {"task": "b", "variation": 0, "scores": [3.0]},
    ]
    assert task_scores({"rows": rows}) == {"a": 12.5, "b": 3.0}


def test_missing_numbers_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 40.0)
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace('"actor/updates":4.0', '"actor/update":4.0', 1))
    with pytest.raises(DataError, match=r"run: iteration 1 has no number `actor/updates` in metrics.jsonl"):
        row_of(folder)
    (folder / "metrics.jsonl").write_text(text.replace('"actor/entropy":1.5', '"actor/entropy":"nan"'))
    assert [point[2] for point in row_of(folder)["training"]] == [None, None]


def test_an_incomplete_or_missing_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="episodes of the last evaluation failed"):
        row_of(make_run(tmp_path / "run", 40.0, complete=False))
    folder = make_run(tmp_path / "other", 40.0)
    (folder / "evaluations.jsonl").write_text("")
    with pytest.raises(DataError, match="no evaluation"):
        row_of(folder)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("evaluations.jsonl", {"score": None}, "evaluations.jsonl: line 2: score = None: a number is allowed"),
        ("evaluations.jsonl", {"rows": []}, r"line 2: rows = \[\]: a length of at least 1"),
        ("evaluations.jsonl", {"rows": [{"task": "lamp", "variation": 0}]}, r"line 2: rows\[0\].scores is missing"),
        ("adaptations.jsonl", {"best_score": []}, r"adaptations.jsonl: line 2: best_score = \[\]: a length"),
        ("adaptations.jsonl", {"best_score": [1.0]}, "line 2: curves of 1 and 2 trials; one length is allowed"),
    ],
)
def test_what_another_version_left_is_named(tmp_path: Path, file: str, change: dict[str, Any], said: str) -> None:
    folder = make_run(tmp_path / "run", 40.0)
    lines = {
        "evaluations.jsonl": read_jsonl(folder / "evaluations.jsonl"),
        "adaptations.jsonl": [make_adaptation()] * 2,
    }
    first, last = lines[file]
    write_lines(folder / file, first, last | change)
    with pytest.raises(DataError, match=said):
        row_of(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is done")
@pytest.mark.parametrize("jobs", [1, 2, 3, 64])
def test_jobs_share_the_cores(jobs: int) -> None:
    before, started = os.sched_getaffinity(0), threading.Barrier(jobs)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # a test process may have a part of them
    own = os.sched_getaffinity(0)

    def seen() -> set[int]:
        started.wait(60)  # so that every thread gets one
        command = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
        return set(map(int, subprocess.check_output(command, text=True).split()))

    with ThreadPoolExecutor(jobs, initializer=share_cores(jobs)) as threads:
        parts = [job.result() for job in [threads.submit(seen) for _ in range(jobs)]]
    after = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)
    assert set.union(*parts) == own == after
    if jobs <= len(own):
        assert sum(map(len, parts)) == len(own) and max(map(len, parts)) - min(map(len, parts)) <= 1
    else:
        assert all(len(part) == 1 for part in parts)
