"""A rollout that cannot be used leaves nothing behind, also where a checkpoint is written after it (overlap)."""

from collections.abc import Sequence
from typing import Any

import pytest

from empo2_jax import assembly
from empo2_jax.algorithms import empo2
from empo2_jax.config import parse_config
from empo2_jax.errors import EnvError
from empo2_jax.experience import Experience
from empo2_jax.interrupts import Stopped
from empo2_jax.memory.tips import TipMemory
from empo2_jax.rollout.collect import Assignment, Collector
from empo2_jax.types import Episode, StopReason, Task
from tests.fixtures.episodes import make_episode


class Asking(Collector):
    """Asks the memory once per episode; then all fail, or the run is to stop."""

    def __init__(self, stop: bool) -> None:
        self.stop, self.seconds = stop, {"retrieval": 0.0, "tips": 0.0}

    def collect(self, assignments: Sequence[Assignment], *, memory: Any, **settings: Any) -> list[Episode]:
        for assignment in assignments:
            memory.retrieve_many([(assignment.task.name, "a key")])
        if self.stop:
            raise Stopped("asked to stop")
        return [make_episode([[5]], stop_reason=StopReason.ENV_ERROR) for _ in assignments]


@pytest.mark.parametrize(("stop", "error"), [(False, EnvError), (True, Stopped)])
def test_a_rollout_that_fails_changes_no_count(stop: bool, error: type[Exception]) -> None:
    config = parse_config({"memory": {"embedder": "hashing"}, "rollout": {"tasks_per_iteration": 2, "group_size": 2}})
    embedder = assembly.make_embedder(config)
    memory: TipMemory = assembly.make_memory(config.memory, embedder)
    novelty = assembly.make_novelty(config.intrinsic, config.memory, embedder)
    memory.retrievals = (7, 3, 4)
    experience = Experience(config, [Task("toy", "bulb", 0)], empo2, Asking(stop), memory, novelty, None)
    with pytest.raises(error):
        experience.make(0)
    assert memory.retrievals == (7, 3, 4)
