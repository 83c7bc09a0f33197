"""A device that runs out of memory: one line and exit code 2; a run goes on from its checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest

from empo2_jax.checkpoint import CheckpointStore
from tests.fixtures.processes import EXHAUSTED, LIMIT_S, assert_same, finish, train_arguments
from tests.fixtures.servers import running_server, tiny_folder, tiny_prompt

ADVICE = "`empo2 plan` says what takes how much, see docs/troubleshooting.md#out-of-memory"


def program(place: str, count: int) -> tuple[str, ...]:
    """The command without memory at the call after `count` of them."""
    return (sys.executable, "-c", EXHAUSTED, place, "before", str(count + 1))


def arguments(run_dir: Path) -> list[str]:
    """Two iterations with one update each."""
    return train_arguments(run_dir, "--update.minibatch_steps", "1000")


@pytest.mark.slow
def test_a_device_without_memory_ends_in_one_line_and_loses_nothing(tmp_path: Path) -> None:
    run_dir, reference = tmp_path / "run", tmp_path / "reference"
    command = [*program("learner.step:Learner:update", 1), *arguments(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(
        "error: the device is out of memory in trainer.py (update): RESOURCE_EXHAUSTED: Out of memory "
    )
    assert line.endswith(ADVICE)
    assert CheckpointStore(run_dir, keep=9).verify() == [(0, None), (1, None)]
    finish(run_dir, arguments)
    finish(reference, arguments)
    assert_same(run_dir, reference)


@pytest.mark.medium
@pytest.mark.parametrize(("method", "place"), [("decode", "batching.py (_run)"), ("load", "http_api.py (_install)")])
def test_a_server_without_memory_answers_and_ends_in_one_line(method: str, place: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    exhausted = program(f"rollout.jax_engine:JaxEngine:{method}", 1)  # it begins with one of each
    with running_server(folder, "--slots", "2", program=exhausted) as server:
        if method == "load":
            response = server.post("/update_weights_from_disk", model_path=str(folder))
        else:
            response = server.post("/generate", input_ids=tiny_prompt(5), sampling_params={"max_new_tokens": 3})
        assert response.status_code == 503
        assert "the engine has stopped" in response.text
        _, errors = server.process.communicate(timeout=LIMIT_S)
    assert server.process.returncode == 2
    (line,) = errors.splitlines()
    assert line.startswith(f"error: the device is out of memory in rollout/{place}: RESOURCE_EXHAUSTED: ")
    assert line.endswith(ADVICE)
