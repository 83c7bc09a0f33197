"""Real gangs of two processes with two virtual devices each: equal to one process, SIGTERM, kills, a frozen rank.

A gang that was disturbed ends bit for bit as one that was not; against one process it agrees to rounding.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empo2_jax.assembly import load_policy
from empo2_jax.checkpoint import CheckpointStore
from empo2_jax.config_file import load_config
from empo2_jax.learner.optim import policy_optimizer
from empo2_jax.learner.step import LearnerState
from empo2_jax.metrics import read_metrics, untimed
from tests.fixtures.processes import LIMIT_S, ROOT, TOY, empo2, line_count, train_arguments

MESH = ("--model.mesh", "2,2,1")
PROCESSES = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}


def gang(run_dir: Path, *options: str, retries: int = 0, **environment: str) -> subprocess.Popen[str]:
    """Begin a small toy run of 2 processes × 2 devices."""
    command = ["bash", str(ROOT / "launch/local.sh"), "--processes", "2", "--devices", "2", "--retries", str(retries)]
    command += ["--grace", "20"]
    command += [*train_arguments(run_dir, *MESH, *options)[1:]]
    return subprocess.Popen(
        command, env=os.environ | PROCESSES | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 0, errors[-3000:]
    return errors


def one_process(run_dir: Path, *options: str, devices: int = 4) -> str:
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "PJRT_NPROC": "64", "NPROC": "64"}
    command = [sys.executable, "-m", "empo2_jax", *train_arguments(run_dir, *MESH, *options)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def state_of(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """Parameters and moments of a checkpoint, on one device."""
    config = load_config(TOY)
    policy = load_policy(config.model)
    opt_state = policy_optimizer(config.update).init(policy.params)
    state, _, _ = CheckpointStore(run_dir, 9).restore(step, LearnerState(policy.params, opt_state, jnp.int32(0)))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def assert_close(run_dir: Path, reference: Path) -> None:
    found, wanted = (untimed(read_metrics(path)) for path in (run_dir, reference))
    assert [record["iteration"] for record in found] == [1, 2]
    for mine, other in zip(found, wanted, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if name != "total/prompt_tokens":  # a process finds fewer prefixes in its part of the rollout
                assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    states = [state_of(path, 2) for path in (run_dir, reference)]
    for name, value in states[1].items():
        np.testing.assert_allclose(states[0][name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    assert all(problem is None for _, problem in CheckpointStore(run_dir, keep=9).verify())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process on the same mesh."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    one_process(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gang that nobody disturbs."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    finish(gang(run_dir))
    return run_dir


def assert_same(run_dir: Path, undisturbed: Path) -> None:
    """Parameters, optimizer, memory, novelty and metrics are the same bit for bit."""
    hashes = [CheckpointStore(path, keep=9).content_hash(2) for path in (run_dir, undisturbed)]
    assert hashes[0] == hashes[1]
    assert untimed(read_metrics(run_dir)) == untimed(read_metrics(undisturbed))


@pytest.mark.medium
def test_two_processes_train(tmp_path: Path) -> None:
    """What continuous integration runs of all this."""
    run_dir = tmp_path / "run"
    small = ("--run.iterations", "1", "--rollout.tasks_per_iteration", "2", "--rollout.group_size", "2")
    finish(gang(run_dir, *small, "--evaluation.variations", "1"))
    (record,) = read_metrics(run_dir)
    assert record["actor/updates"] == 1 and record["episode/invalid"] == 0
    assert CheckpointStore(run_dir, keep=9).verify() == [(0, None), (1, None)]
    assert sorted(path.name for path in (run_dir / "logs/attempt_1").iterdir()) == ["process_0.log", "process_1.log"]


@pytest.mark.slow
def test_two_processes_are_one_and_one_goes_on_from_two(reference: Path, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    assert_close(run_dir, reference)
    assert not list((run_dir / "checkpoints").glob(".*"))
    began, here = str(run_dir / "checkpoints/1"), "the checkpoint is of mesh [2, 2, 1] in 2 process(es), this is mesh "
    assert f"{here}[2, 2, 1] in 1 process(es)" in one_process(run_dir, "--resume", began)  # 1 × 4 on the same mesh
    assert_close(run_dir, reference)
    elastic = empo2(*train_arguments(run_dir, "--model.mesh", "1,1,1", "--resume", began))
    assert elastic.returncode == 0, elastic.stderr[-2000:]
    assert f"{here}[1, 1, 1] in 1 process(es)" in elastic.stderr
    assert_close(run_dir, reference)


def rank(run_dir: Path, number: int) -> int:
    """Process id of a rank, from what it inherited."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                settings, line = (entry / "environ").read_bytes().split(b"\0"), (entry / "cmdline").read_bytes()
            except OSError:
                continue
            mine = f"EMPO2_PROCESS_ID={number}".encode() in settings and b"empo2_jax" in line
            if mine and str(run_dir).encode() in line:
                return int(entry.name)
    raise AssertionError(f"no rank {number}")


def wait_until(moment: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not moment():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_sigterm_to_any_rank_saves_once_on_all_and_the_run_goes_on(
    number: int, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = gang(run_dir, "--checkpoint.every", "2")
    wait_until(lambda: line_count(run_dir / "metrics.jsonl") == 1, process)
    os.kill(rank(run_dir, number), signal.SIGTERM)
    asked = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - asked < 60
    assert process.returncode == 143, errors[-3000:]
    for log in (run_dir / "logs/attempt_1").iterdir():
        text = log.read_text(encoding="utf-8")
        assert len(re.findall(r"stopped; checkpoints \[0, 1\]; resume with: empo2 train", text)) == 1, text[-2000:]
        assert "Traceback" not in text
    finish(gang(run_dir, "--checkpoint.every", "2"))
    assert_same(run_dir, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_rank_is_named_and_the_gang_starts_again(number: int, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = gang(run_dir, retries=1)
    wait_until((run_dir / "checkpoints/0").is_dir, process)
    os.kill(rank(run_dir, number), signal.SIGKILL)
    errors = finish(process)
    assert f"supervise: attempt 1: first cause: process {number}: killed by SIGKILL" in errors
    assert_same(run_dir, undisturbed)


@pytest.mark.slow
def test_a_frozen_rank_is_named_and_the_gang_starts_again(undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = gang(run_dir, retries=1)
    wait_until((run_dir / "checkpoints/0").is_dir, process)
    os.kill(rank(run_dir, 1), signal.SIGSTOP)  # its heartbeats stop too; a busy one is the watchdog's (test_watch)
    errors = finish(process)
    assert re.search(
        r"first cause: process 0: killed by SIGABRT: .*unhealthy \(stopped sending heartbeats\): 1", errors
    )
    assert_same(run_dir, undisturbed)
