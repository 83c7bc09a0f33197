"""Rows that no batch has room for leave the loss alone, and processes wait as long as a run is fetched."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from empo2_jax import distributed, storage, trainer
from empo2_jax.algorithms.base import group_metrics
from empo2_jax.config_file import load_config
from empo2_jax.errors import CheckpointError
from empo2_jax.trainer import Trainer
from empo2_jax.types import EpisodeGroup
from tests.fixtures.episodes import TASK, make_episode
from tests.fixtures.processes import TOY


@pytest.mark.medium
def test_a_row_longer_than_the_largest_bucket_leaves_returns_alone(tmp_path: Path) -> None:
    overrides = [f"run.dir='{tmp_path}'", "run.tensorboard=false", "rollout.slots=2", "update.minibatch_steps=2"]
    long = make_episode([[5] * 400], rewards=[30.0])  # the largest bucket has 384 tokens
    short = [make_episode([[5, 6]], rewards=[reward]) for reward in (0.0, 60.0)]
    groups = [EpisodeGroup(TASK, (long, *short))]
    assert group_metrics(groups)["episode/score"] == 30.0
    with ExitStack() as stack:
        made = Trainer(load_config(TOY, overrides), stack)
        advantages = made.algorithm.advantages(groups, made.config.algorithm)
        # Compared with all three returns, 30 ± 30: that of the long one is among them.
        np.testing.assert_allclose(np.ravel([np.mean(values) for values in advantages]), [0, -1, 1], atol=1e-6)
        metrics = made.update(groups[0].episodes, advantages)
    assert metrics["actor/rows_too_long"] == 1.0 and metrics["actor/rows_per_episode"] == 1.0
    assert metrics["actor/updates"] >= 1.0


def test_the_others_wait_as_long_as_a_run_may_take_to_come_from_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def claim(*_: object) -> None:
        limits.append(distributed.current().limit_s)
        raise CheckpointError("seen")

    monkeypatch.setattr(trainer, "_claim", claim)
    for mirror in ("", f"file://{tmp_path}/there"):
        with pytest.raises(CheckpointError, match="seen"):
            trainer.run(load_config(TOY, [f"run.dir='{tmp_path}/run'", f"run.mirror='{mirror}'"]))
    assert limits[0] == distributed.current().limit_s < storage.LIMIT_S < limits[1]
