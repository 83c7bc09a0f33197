"""Kill a real toy run, resume it, and compare with the run that nobody disturbed: same hash, no step twice."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.processes import (
    LIMIT_S,
    ROOT,
    assert_same,
    empo2,
    finish,
    line_count,
    start,
    stop_when,
    train_arguments,
)

pytestmark = pytest.mark.medium


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


def test_interrupted_run_saves_what_is_complete_says_how_to_resume_and_resumes(reference: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = train_arguments(run_dir, "--checkpoint.every", "9")
    code, errors = stop_when(start(*arguments), lambda: line_count(run_dir / "metrics.jsonl") == 1, signal.SIGINT)
    assert code == 130
    assert "Traceback" not in errors
    end = f"{run_dir}: stopped; checkpoints [0, 1]; resume with: empo2 {' '.join(arguments)}"
    assert errors.splitlines()[-1] == end
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
        "; see docs/troubleshooting.md#checkpoints-that-are-skipped"
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
    assert errors.splitlines()[-1].startswith(f"{run_dir}: stopped; checkpoints [0, 1]; ")
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
