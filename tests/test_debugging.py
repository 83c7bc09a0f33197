"""`empo2 debug`: an update of a real run again, bit for bit; a changed batch is found."""

from pathlib import Path

import pytest

from empo2_jax.debugging import check
from empo2_jax.errors import CheckpointError
from empo2_jax.recorded_updates import read_updates, write_updates
from tests.fixtures.processes import empo2, train_arguments

pytestmark = pytest.mark.medium


def test_a_recorded_iteration_runs_again_bit_for_bit(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    smaller = ("--update.minibatch_steps", "12", "--run.updates_kept", "1", "--rollout.tasks_per_iteration", "2")
    done = empo2(*train_arguments(run_dir, *smaller))
    assert done.returncode == 0, done.stderr[-2000:]
    again = empo2("debug", str(run_dir), "--iteration", "2")
    assert again.returncode == 0, again.stdout + again.stderr[-2000:]
    *updates, state = again.stdout.splitlines()
    assert len(updates) >= 2 and all(line.endswith(": equal to the run") for line in updates)
    assert state == "the state after iteration 2 is that of its checkpoint"

    first, *rest = read_updates(run_dir, 2)
    other = first.batches[0]._replace(advantages=first.batches[0].advantages + 1)
    write_updates(run_dir / "updates/2.npz", [first._replace(batches=[other, *first.batches[1:]]), *rest])
    said: list[str] = []
    assert not check(run_dir, 2, said.append)
    assert "DIFFERENT from the run: " in said[0] and "NOT" in said[-1]
    (run_dir / "checkpoints/1").rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"iteration 2 begins at checkpoint 1, and there are \[0, 2\]"):
        check(run_dir, 2, said.append)
