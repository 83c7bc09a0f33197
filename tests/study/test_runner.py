"""What is run, what is kept, what a failure leaves; with runs that are made up, and once with real processes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from empo2_jax.checkpoint import CheckpointStore
from empo2_jax.cli import main
from empo2_jax.errors import CheckpointError, ConfigError, DataError
from empo2_jax.metrics import Record, read_jsonl
from empo2_jax.run_record import RunLock
from empo2_jax.study import runner
from empo2_jax.study.base import Cell
from empo2_jax.study.page import PAGE_FILE
from empo2_jax.study.results import RESULTS_FILE, read_results, write_results
from empo2_jax.study.runs import Processes
from tests.fixtures.processes import line_count, start, stop_when
from tests.fixtures.recorded import write_lines
from tests.fixtures.studies import make_results, make_row, make_study

ROOT = Path(__file__).parents[2]


class Runs:
    """Stands for the processes: remembers the cells, fails where it is told to."""

    def __init__(self, *failing: tuple[str, int]) -> None:
        self.failing, self.cells = failing, []

    def __call__(self, cell: Cell, folder: Path, processes: Processes) -> Record:
        self.cells.append((cell.arm.name, cell.seed))
        if self.cells[-1] in self.failing:
            raise DataError(f"{cell} failed: no Java")
        score = {"new": 80.0, "old": 20.0}[cell.arm.name] + cell.seed
        return make_row(cell.arm.name, cell.seed, score) | {"fingerprint": cell.fingerprint()}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    monkeypatch.setattr(runner, "run_cell", made)
    return made


def test_a_finished_study_is_not_run_again(tmp_path: Path, runs: Runs) -> None:
    path = make_study(tmp_path)
    assert runner.run_studies([path], tmp_path / "out", command=["empo2", "study", "small.toml"])
    assert len(runs.cells) == 6
    results = read_results(tmp_path / "out/small" / RESULTS_FILE)
    assert [row["score"] for row in results.of("new")] == [80.0, 81.0, 82.0]
    assert results.command == "empo2 study small.toml"
    assert "Study small" in (tmp_path / "out/small" / PAGE_FILE).read_text()
    assert runner.run_studies([path], tmp_path / "out", seeds=2)
    assert len(runs.cells) == 6
    assert len(read_results(tmp_path / "out/small" / RESULTS_FILE).rows) == 4


def test_the_others_go_on_and_the_failing_cell_is_named(tmp_path: Path, runs: Runs) -> None:
    runs.failing = (("old", 1),)
    with pytest.raises(DataError, match="study small: arm old, seed 1 failed: no Java; the same command runs what is"):
        runner.run_studies([make_study(tmp_path)], tmp_path / "out", jobs=1)
    assert len(runs.cells) == 6
    results = read_results(tmp_path / "out/small" / RESULTS_FILE)
    assert len(results.rows) == 5 and results.failed == ["arm old, seed 1 failed: no Java"]
    page = (tmp_path / "out/small" / PAGE_FILE).read_text()
    assert "Missing: arm old, seed 1 failed: no Java" in page and "<td>missing</td>" in page
    runs.failing = ()
    assert runner.run_studies([make_study(tmp_path)], tmp_path / "out", jobs=1)
    assert runs.cells[6:] == [("old", 1)]


def test_rows_of_another_configuration_do_not_count(tmp_path: Path, runs: Runs) -> None:
    path = make_study(tmp_path)
    runner.run_studies([path], tmp_path / "out", seeds=1)
    (tmp_path / "base.toml").write_text('[run]\niterations = 2\n[env]\nname = "toy"\n[update]\nepochs = 2\n')
    runner.run_studies([path], tmp_path / "out", seeds=1)
    assert runs.cells == [("new", 0), ("old", 0)] * 2
    (tmp_path / "base.toml").write_text('[run]\niterations = 3\n[env]\nname = "toy"\n[update]\nepochs = 2\n')
    runner.run_studies([path], tmp_path / "out", seeds=1)
    assert runs.cells == [("new", 0), ("old", 0)] * 3


def test_a_study_goes_on_elsewhere_from_its_results(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    path, results = make_study(tmp_path), tmp_path / "results.json"
    path.write_text(f"{path.read_text()}[arms.again]\nalgorithm.p_memory = 0.25\n")
    runner.run_studies([path], tmp_path / "here", seeds=2)
    write_results(results, read_results(tmp_path / "here/small" / RESULTS_FILE))
    there = ["study", str(path), "--out", str(tmp_path / "there")]
    capsys.readouterr()
    assert main([*there, "--continue", str(results), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "study small: 9 runs, 6 finished; new − old"
    del runs.cells[:]
    assert main([*there, "--continue", str(results)]) == 0
    assert runs.cells == [("new", 2), ("old", 2)]
    assert main(there) == main([*there, "--continue", str(results)]) == 0  # the rows are kept, each once
    assert len(runs.cells) == 2 and len(read_jsonl(tmp_path / "there/small/rows.jsonl")) == 6
    whole = read_results(tmp_path / "there/small" / RESULTS_FILE)
    assert [row["score"] for row in whole.of("again")] == [80.0, 81.0, 82.0]


def test_a_study_goes_on_from_results_of_earlier_code(tmp_path: Path, runs: Runs) -> None:
    path, results = make_study(tmp_path), tmp_path / "results.json"
    runner.run_studies([path], tmp_path / "here", seeds=2)
    made = json.loads((tmp_path / "here/small" / RESULTS_FILE).read_text())
    for arm in made["arms"].values():
        del arm["config"]["warmstart.kinds"]  # has its default in the study
    results.write_text(json.dumps(made))
    assert runner.plan_lines([path], tmp_path / "there", known=results)[0].startswith("study small: 6 runs, 4 finished")
    made["arms"]["old"]["config"]["algorithm.p_memory"] = 0.5
    results.write_text(json.dumps(made))
    assert runner.plan_lines([path], tmp_path / "there", known=results)[0].startswith("study small: 6 runs, 2 finished")
    del made["arms"]["old"]["config"]["algorithm.p_memory"]  # then it was 0.25, as in the arm `new`
    results.write_text(json.dumps(made))
    said = "results.json: arm new and arm old, seed 0, are one configuration and have scores of 80.0 and 20.0; equal"
    with pytest.raises(DataError, match=said):
        runner.plan_lines([path], tmp_path / "there", known=results)


def test_a_run_with_other_trials_of_adaptation_is_another(tmp_path: Path, runs: Runs) -> None:
    path, results = make_study(tmp_path), tmp_path / "results.json"
    text, panel = path.read_text(), ROOT / "configs/panels/toy_unseen.toml"
    asked = 'adaptation_trials = 2\nadaptation_arms = ["new"]\n'
    path.write_text(f'{asked}adaptation_panel = "{panel}"\n{text}')
    runner.run_studies([path], tmp_path / "here", seeds=1)
    made = json.loads((tmp_path / "here/small" / RESULTS_FILE).read_text())

    def finished(adaptation: Record | None) -> str:
        row = {key: value for key, value in made["rows"][0].items() if key != "adaptation"}
        rows = [row | ({"adaptation": adaptation} if adaptation else {}), *made["rows"][1:]]
        results.write_text(json.dumps(made | {"rows": rows}))
        return runner.plan_lines([path], tmp_path / "there", known=results)[0]

    assert "6 runs, 2 finished" in finished({"score": [1.0, 2.0], "best": [1.0, 2.0]})
    assert "6 runs, 1 finished" in finished({"score": [1.0], "best": [1.0]})
    assert "6 runs, 1 finished" in finished(None)
    path.write_text(f"{asked}{text}")  # on the problems of the evaluations
    assert "6 runs, 1 finished" in finished({"score": [1.0, 2.0], "best": [1.0, 2.0]})


def test_results_of_other_runs_cannot_be_gone_on_from(tmp_path: Path, runs: Runs) -> None:
    path, results = make_study(tmp_path), tmp_path / "results.json"
    write_results(results, make_results({"new": [1.0], "old": [2.0]}))
    for choice, message in (
        ({"paths": [path]}, "results.json: none of its runs has a configuration and seed that is to be run here"),
        ({"paths": [path, path]}, r"--continue .*results.json: one study is allowed, not 2"),
        ({"paths": [path], "check": results}, "a check is of runs made here; one is allowed"),
    ):
        with pytest.raises(ConfigError, match=message):
            runner.run_studies(out=tmp_path / "out", known=results, **choice)
    assert runs.cells == [] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["arm", "fingerprint", "score"])
def test_a_row_that_cannot_be_is_named_with_its_line(tmp_path: Path, runs: Runs, key: str) -> None:
    path = make_study(tmp_path)
    runner.run_studies([path], tmp_path / "out", seeds=1)
    file = tmp_path / "out/small/rows.jsonl"
    first, last = read_jsonl(file)
    write_lines(file, first, {name: value for name, value in last.items() if name != key})
    with pytest.raises(DataError, match=rf"out/small/rows.jsonl: line 2: {key} is missing"):
        runner.plan_lines([path], tmp_path / "out")


def test_arms_of_equal_configuration_share_their_runs(tmp_path: Path, runs: Runs) -> None:
    path, out = make_study(tmp_path), tmp_path / "out"
    path.write_text(f"{path.read_text()}[arms.again]\nalgorithm.p_memory = 0.25\n")
    first, _, third, *_ = runner.plan_lines([path], out)[1:]
    assert first.startswith("  to run: ") and third == "  the run of arm new, seed 0: arm again, seed 0"
    runs.failing = (("new", 1),)
    with pytest.raises(
        DataError, match="arm new, seed 1 failed: no Java; study small: arm again, seed 1: would be the s"
    ):
        runner.run_studies([path], out)
    runs.failing = ()
    runner.run_studies([path], out)
    assert {arm for arm, _ in runs.cells} == {"new", "old"} and len(runs.cells) == 7
    results = read_results(out / "small" / RESULTS_FILE)
    assert [row["score"] for row in results.of("again")] == [row["score"] for row in results.of("new")]
    assert len(read_jsonl(out / "small/rows.jsonl")) == 6
    assert "new, again are one configuration, and their runs the same." in (out / "small" / PAGE_FILE).read_text()
    path.write_text(path.read_text().replace("arms.again", "arms.renamed"))
    runner.run_studies([path], out, arms=("renamed",))
    assert len(runs.cells) == 7


def test_several_studies_lie_side_by_side(tmp_path: Path, runs: Runs) -> None:
    first = make_study(tmp_path)
    second = tmp_path / "second.toml"
    second.write_text(first.read_text())
    runner.run_studies([first, second], tmp_path / "out", seeds=1)
    assert {path.parent.name for path in tmp_path.glob(f"out/*/{RESULTS_FILE}")} == {"small", "second"}


def test_a_folder_belongs_to_one_study_file(tmp_path: Path, runs: Runs) -> None:
    first, out = make_study(tmp_path), tmp_path / "out"
    (tmp_path / "other").mkdir()
    second = make_study(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"small.toml and .*other/small.toml: both are study 'small', and a folder"):
        runner.run_studies([first, second], out)
    with pytest.raises(ConfigError, match="both are study 'small'"):
        runner.plan_lines([first, first], out)
    assert runs.cells == [] and not out.exists()
    runner.run_studies([first], out, seeds=1)
    with pytest.raises(
        ConfigError, match=rf"out/small: belongs to the study {first}, not to {second}; use another --o"
    ):
        runner.run_studies([second], out, seeds=1)
    assert len(runs.cells) == 2
    first.rename(tmp_path / "moved.toml")
    runner.run_studies([second], out, seeds=1)  # the same runs, from the file that is left
    assert len(runs.cells) == 2


def test_one_process_at_a_time_runs_a_study(tmp_path: Path, runs: Runs) -> None:
    path, out = make_study(tmp_path), tmp_path / "out"
    held = "import sys\nfrom pathlib import Path\nfrom empo2_jax.run_record import RunLock\n"
    held += "with RunLock(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    command = [sys.executable, "-c", held, str(out / "small")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="out/small: another process is using this directory"):
            runner.run_studies([path], out)
        assert runs.cells == []
        other.communicate("")
    assert runner.run_studies([path], out)


def test_a_check_names_the_cell_that_differs(tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    path, committed = make_study(tmp_path), tmp_path / "committed.json"
    runner.run_studies([path], tmp_path / "out")
    committed.write_text((tmp_path / "out/small" / RESULTS_FILE).read_text())
    capsys.readouterr()
    assert runner.run_studies([path], tmp_path / "again", check=committed)
    printed = capsys.readouterr().out
    assert "6 of 6 runs have exactly the committed scores" in printed and "reproduced" in printed
    values = json.loads(committed.read_text())
    for arm in values["arms"].values():
        arm["config"]["gone.key"] = 1  # of earlier code; no difference
    for row in values["rows"]:
        if row["arm"] == "old":
            row["tasks"] = {"lamp": 50.0}
    committed.write_text(json.dumps(values))
    assert not runner.run_studies([path], tmp_path / "out", check=committed)
    assert "old, score: 21.00 is outside of 50.00 to 50.00" in capsys.readouterr().out


def test_a_check_of_some_arms_says_which_it_leaves_out(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    path, committed, out = make_study(tmp_path), tmp_path / "committed.json", tmp_path / "out"
    runner.run_studies([path], out)
    committed.write_text((out / "small" / RESULTS_FILE).read_text())
    capsys.readouterr()
    assert runner.run_studies([path], out, arms=("new",), check=committed)
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "check: 3 of 3 runs have exactly the committed scores",
        "check: --arms leaves out, and nothing was checked of: old",
        "check: reproduced, every checked arm within its committed interval",
    ]
    path.write_text(path.read_text().replace("[arms.old]", "[arms.renamed]").replace('"old"', '"renamed"'))
    assert not runner.run_studies([path], out, check=committed)
    printed = capsys.readouterr().out
    assert "old: the committed results have it, and no run of it is there" in printed
    assert "renamed: no such arm in the committed results" in printed and "leaves out" not in printed


def test_what_cannot_work_is_refused_before_anything_is_run(tmp_path: Path, runs: Runs) -> None:
    path, out = make_study(tmp_path), tmp_path / "out"
    (tmp_path / "file").touch()
    committed = tmp_path / "committed.json"
    runner.run_studies([path], out, seeds=1)
    write_results(committed, read_results(out / "small" / RESULTS_FILE))
    write_results(tmp_path / "others.json", make_results({"grpo": [1.0], "old": [2.0]}))
    del runs.cells[:]
    for choice, message in (
        ({"jobs": 0}, "--jobs 0: at least 1"),
        ({"seeds": 99999}, "--seeds 99999: 1 to 1000"),
        ({"check": committed, "seeds": 2}, "--check needs at least 3 seeds, not 2"),
        ({"check": tmp_path / "others.json"}, r"--check .*others.json: new: no such arm in the committed results"),
        ({"arms": ("olt",)}, "no arm 'olt'"),
    ):
        with pytest.raises(ConfigError, match=message):
            runner.run_studies([path], tmp_path / "new", **choice)
    with pytest.raises(ConfigError, match=r"--check .*: one study is allowed, not 2"):
        runner.run_studies([path, path], out, check=committed)
    with pytest.raises(CheckpointError, match=r"file/out/small: cannot be written: Not a directory"):
        runner.run_studies([path], tmp_path / "file/out")
    with pytest.raises(DataError, match="not the results"):
        (tmp_path / "x.json").write_text("{}")
        runner.run_studies([path], out, check=tmp_path / "x.json")
    assert runs.cells == [] and not (tmp_path / "new").exists()


def test_a_dry_run_says_what_is_finished_and_touches_nothing(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = make_study(tmp_path, 'adaptation_trials = 2\nadaptation_arms = ["new"]\n'), tmp_path / "out"
    assert main(["study", str(path), "--out", str(out), "--dry-run", "--seeds", "1"]) == 0
    assert not out.exists()
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "study small: 2 runs, 0 finished; new − old"
    folder = out / "small/new/seed0"
    command = f"empo2 train {tmp_path}/base.toml --run.seed 0 --run.dir {folder} --run.tensorboard false"
    assert second == f"  to run: {command}; then empo2 adapt {folder} --trials 2"
    assert "--algorithm.p_memory 0.0 --run.seed 0" in third
    assert main(["study", str(path), "--out", str(out), "--seeds", "1"]) == 1  # one seed has no interval
    capsys.readouterr()
    assert main(["study", str(path), "--out", str(out), "--dry-run", "--seeds", "2"]) == 0
    assert [line.split(":")[0].strip() for line in capsys.readouterr().out.splitlines()[1:]] == [
        *("finished", "finished", "to run", "to run")
    ]


def test_a_dry_run_refuses_what_the_study_would(tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, other = make_study(tmp_path), tmp_path / "out", tmp_path / "other"
    other.mkdir()
    runner.run_studies([make_study(other)], out, seeds=1)
    for options, message in (
        (["--jobs", "0"], "--jobs 0: at least 1 is allowed"),
        (["--check", "missing.json"], "missing.json: cannot be read: No such file or directory"),
        (["--out", f"{path}/out"], f"{path}/out/small: cannot be written: Not a directory"),
        (["--out", str(out)], f"{out}/small: belongs to the study {other}/small.toml, not to {path}"),
    ):
        capsys.readouterr()
        assert main(["study", str(path), *options, "--dry-run"]) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"error: {message}") and said.err.count("\n") == 1 and not said.out


@pytest.mark.slow
def test_real_runs_and_a_failing_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "run.iterations = 1\nrollout.tasks_per_iteration = 2\nrollout.group_size = 2\n"
    path = tmp_path / "real.toml"
    path.write_text(
        f'base = "{ROOT}/configs/toy.toml"\nseeds = 1\nreference = "naive"\n'
        f'adaptation_trials = 1\nadaptation_arms = ["empo2"]\n[arms.empo2]\n{small}'
        "[arms.naive]\nrun.iterations = 0\n"
        '[arms.broken]\nrun.iterations = 1\nmodel.path = "/nowhere/model"\n'
    )
    assert main(["study", str(path), "--out", str(tmp_path / "out"), "--jobs", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: study real: arm broken, seed 0 failed: ") and "/nowhere/model" in error
    results = read_results(tmp_path / "out/real" / RESULTS_FILE)
    assert results.names == ["empo2", "naive"]
    empo2, naive = results.rows
    assert len(empo2["training"]) == 1 and empo2["environment_steps"] > 0 and len(empo2["adaptation"]["best"]) == 1
    assert naive["training"] == [] and naive["panel"] == [[0, naive["score"], 0.0]]
    assert len(read_jsonl(tmp_path / "out/real/rows.jsonl")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_study_leaves_no_process_and_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    path, out = tmp_path / "real.toml", tmp_path / "out"
    small = "run.iterations = 3\nrollout.tasks_per_iteration = 2\nrollout.group_size = 2\ncheckpoint.every = 1\n"
    path.write_text(f'base = "{ROOT}/configs/toy.toml"\nseeds = 1\nreference = "a"\n[arms.a]\n{small}')
    run_dir = out / "real/a/seed0"
    process = start("study", str(path), "--out", str(out))
    code, errors = stop_when(process, lambda: line_count(run_dir / "metrics.jsonl") > 0, number)
    said = {signal.SIGTERM: (143, "study real: stopped"), signal.SIGINT: (130, "interrupted")}[number]
    assert (code, errors.strip()) == (said[0], f"{said[1]}; resume with: empo2 study {path} --out {out}")
    with RunLock(run_dir):
        assert CheckpointStore(run_dir, keep=1).latest() is not None
    assert main(["study", str(path), "--out", str(out)]) == 1  # one arm is never better than itself
    assert len(read_results(out / "real" / RESULTS_FILE).rows[0]["training"]) == 3
