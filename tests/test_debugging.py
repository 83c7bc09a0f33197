"""`empo2 debug`: an update of a real run again, bit for bit; a changed batch is found."""

from pathlib import Path

import pytest

from empo2_jax.config_file import dump_toml, load_config
from empo2_jax.debugging import check
from empo2_jax.errors import CheckpointError, ConfigError
from empo2_jax.recorded_updates import read_updates, write_updates
from tests.fixtures.processes import TOY, empo2, train_arguments

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


def test_a_run_of_more_devices_than_are_here_is_refused(tmp_path: Path) -> None:
    config = load_config(TOY, [f"run.dir='{tmp_path}'", "model.mesh=[2,1,1]"])
    (tmp_path / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    write_updates(tmp_path / "updates/1.npz", [])
    with pytest.raises(
        ConfigError, match=r"updates were made on 2 devices .*here are 1; equal bits need the same mesh"
    ):
        check(tmp_path, 1, print)
