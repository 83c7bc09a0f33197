"""Kill a real toy run, resume it, and compare with the run that nobody disturbed: same hash, no step twice."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from empo2_jax.checkpoint import CheckpointStore
from empo2_jax.metrics import read_metrics
from tests.fixtures.processes import LIMIT_S, ROOT, empo2, line_count, start, stop_when, train_arguments

pytestmark = pytest.mark.medium

# Kills itself right before or after the N-th call of a method of the package, then is the `empo2` command.
SUICIDE = """
import importlib, os, signal, sys
from empo2_jax.cli import main
place, when, count = sys.argv[1:4]
module, owner, name = place.split(":")
owner = getattr(importlib.import_module("empo2_jax." + module), owner)
method, calls = getattr(owner, name), 0
def wrapped(*args, **kwargs):
    global calls
    calls += 1
    if when == "before" and calls == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    result = method(*args, **kwargs)
    if when == "after" and calls == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, name, wrapped)
sys.exit(main(sys.argv[4:]))
"""
BOUNDARIES = (  # in the order of a run; the count is that of the process, which starts at the last checkpoint
    ("trainer:Trainer:evaluate", "after", 1),  # of the start policy, before checkpoint 0
    ("checkpoint:CheckpointStore:_write_manifest", "before", 1),  # checkpoint 0 half written
    ("checkpoint:CheckpointStore:_publish", "before", 1),  # checkpoint 0 written, not yet there
    ("trainer:Trainer:save", "after", 1),
    ("rollout.jax_engine:JaxEngine:generate", "after", 3),  # in mid-rollout
    ("trainer:Trainer:collect", "after", 1),
    ("trainer:Trainer:reward_novelty", "after", 1),
    ("learner.step:Learner:update", "before", 1),
    ("trainer:Trainer:update", "after", 1),
    ("memory.tips:TipMemory:commit", "after", 1),
    ("memory.novelty:NoveltyStore:commit", "after", 1),
    ("metrics:EpisodeLog:write", "before", 1),
    ("metrics:EpisodeLog:write", "after", 1),
    ("metrics:MetricsLog:write", "after", 1),
    ("checkpoint:CheckpointStore:_publish", "before", 1),
    ("checkpoint:CheckpointStore:_drop_others", "before", 1),  # checkpoint 1 is there
    ("trainer:Trainer:evaluate", "after", 1),  # of the end
    ("trainer:Trainer:save", "after", 1),
)


def assert_same(run_dir: Path, reference: Path) -> None:
    hashes = [empo2("checkpoint", "hash", str(run), "--step", "2") for run in (run_dir, reference)]
    assert [done.returncode for done in hashes] == [0, 0]
    assert hashes[0].stdout == hashes[1].stdout
    assert [record["iteration"] for record in read_metrics(run_dir)] == [1, 2]
    assert (run_dir / "evaluations.jsonl").read_bytes() == (reference / "evaluations.jsonl").read_bytes()
    assert all(problem is None for _, problem in CheckpointStore(run_dir, keep=9).verify())


def finish(run_dir: Path) -> subprocess.CompletedProcess[str]:
    done = empo2(*train_arguments(run_dir))
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list((run_dir / "checkpoints").glob(".*")), "a draft outlived the next save"
    return done


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that is not disturbed."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    finish(run_dir)
    return run_dir


def test_killed_in_rollout_and_between_metrics_and_checkpoint(reference: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    checkpoint, metrics = run_dir / "checkpoints", run_dir / "metrics.jsonl"
    code, _ = stop_when(start(*train_arguments(run_dir)), (checkpoint / "0").is_dir, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert line_count(metrics) == 0
    code, _ = stop_when(start(*train_arguments(run_dir)), lambda: line_count(metrics) == 1, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert line_count(metrics) == 1
    assert not (checkpoint / "2").exists()
    finish(run_dir)
    assert_same(run_dir, reference)


def test_interrupted_run_says_how_to_resume_and_resumes(reference: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, errors = stop_when(start(*train_arguments(run_dir)), (run_dir / "checkpoints/1").is_dir, signal.SIGINT)
    assert code == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == f"interrupted; resume with: empo2 {' '.join(train_arguments(run_dir))}"
    finish(run_dir)
    assert_same(run_dir, reference)


def test_corrupt_newest_checkpoint_is_named_and_the_one_before_is_used(reference: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(reference, run_dir)
    tips = run_dir / "checkpoints/2/memory/tips.safetensors"
    content = bytearray(tips.read_bytes())
    content[-1] ^= 1
    tips.write_bytes(content)
    done = finish(run_dir)
    warning, *rest = done.stderr.splitlines()
    assert warning == (
        f"warning: checkpoint {run_dir / 'checkpoints/2'} is skipped: memory/tips.safetensors: checksum does not match"
    )
    assert [line.split(" · ")[0] for line in rest if line.startswith("iteration")] == ["iteration 2/2"]
    assert_same(run_dir, reference)


def test_going_back_to_a_step_repeats_the_run_and_a_missing_step_harms_nothing(reference: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(reference, run_dir)
    before = {
        path: path.read_bytes()
        for path in run_dir.rglob("*")
        if path.suffix == ".jsonl" or path.name == "manifest.json"
    }
    refused = empo2(*train_arguments(run_dir), "--resume", str(run_dir / "checkpoints/7"))
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith("checkpoints/7: no such checkpoint; there are [0, 1, 2]")
    assert {path: path.read_bytes() for path in before} == before
    done = empo2(*train_arguments(run_dir), "--resume", str(run_dir / "checkpoints/1"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(run_dir, reference)


def test_ctrl_c_during_a_save_waits_for_it(reference: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def saving() -> bool:
        return any((run_dir / "checkpoints").glob(".tmp-1/state*"))

    code, errors = stop_when(start(*train_arguments(run_dir)), saving, signal.SIGINT)
    assert code == 130
    assert errors.splitlines()[-1].startswith("interrupted; ")
    assert "Traceback" not in errors
    assert not saving() and (run_dir / "checkpoints/1").is_dir()


@pytest.mark.parametrize(
    ("module", "said"),
    [("pydantic", "interrupted"), ("jaxlib._jax", "interrupted; resume with: empo2 train configs/toy.toml")],
)
def test_ctrl_c_while_modules_are_imported_is_one_line(module: str, said: str) -> None:
    source = (
        "import os, signal, sys\n"
        "from empo2_jax.__main__ import main\n"
        "class Press:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == '{module}':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Press())\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, "-c", source, "train", "configs/toy.toml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{said}\n")


def test_ctrl_c_in_a_callback_of_the_garbage_collector_is_not_lost() -> None:
    source = (
        "import gc, os, signal, sys, time\n"
        "from empo2_jax import cli, config\n"
        "def press(phase, info):\n"
        "    gc.callbacks.remove(press)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "def doctor(*_):\n"
        "    gc.callbacks.append(press)\n"
        "    gc.collect()\n"
        "    time.sleep(20)\n"
        "    return 0\n"
        "cli._doctor = doctor\n"
        "sys.exit(cli.main(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130
    assert done.stderr == "interrupted; resume with: empo2 doctor\n"


def test_disk_that_fills_up_costs_nothing_saved(reference: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(reference, run_dir)
    shutil.rmtree(run_dir / "checkpoints/2")
    limited = ("bash", "-c", 'ulimit -f 600; exec "$0" -m empo2_jax "$@"', sys.executable)  # KiB per file
    process = start(*train_arguments(run_dir), program=limited)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, errors[-2000:]
    assert errors.splitlines()[-1].startswith(f"error: {run_dir / 'checkpoints/2'}: cannot save: needs ")
    assert "Traceback" not in errors
    finish(run_dir)
    assert_same(run_dir, reference)


@pytest.mark.slow
def test_killed_at_every_phase_boundary(reference: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    program = (sys.executable, "-c", SUICIDE)
    for place, when, count in BOUNDARIES:
        process = start(place, when, str(count), *train_arguments(run_dir), program=program)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == -signal.SIGKILL, (place, when, errors[-2000:])
    finish(run_dir)
    assert_same(run_dir, reference)


@pytest.mark.slow
def test_killed_at_ten_random_moments(reference: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    finish(tmp_path / "timed")
    length = time.monotonic() - began
    draw = random.Random(0)
    runs, kills = [tmp_path / "run0"], 0
    while kills < 10:
        process = start(*train_arguments(runs[-1]))
        try:
            _, errors = process.communicate(timeout=draw.uniform(0.2, 1.0) * length)
            assert process.returncode == 0, errors[-2000:]
            runs.append(tmp_path / f"run{len(runs)}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
    finish(runs[-1])
    for run_dir in runs:
        assert_same(run_dir, reference)
