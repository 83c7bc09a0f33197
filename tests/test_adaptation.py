"""Trials with a memory of their own: failures are no zeros, total failure is an error, scopes are kept."""

from typing import Any

import pytest

from empo2_jax.adaptation import Trial, adapt, record
from empo2_jax.errors import EnvError
from empo2_jax.memory.tips import Scope, TipMemory
from empo2_jax.rollout.reflect import ScriptedTipWriter
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.types import Mode
from tests.fixtures.worlds import CorridorFamily, babble, empty_memory, make_collector, word_chat


def adapted(family: CorridorFamily, variations: int, trials: int, memory: Any = None, scope: Scope = "variation"):
    collector = make_collector(ReplayEngine(babble(word_chat())), family, step_limit=3, retries=0)
    memory = empty_memory() if memory is None else memory
    tasks, writer = family.tasks("test")[:variations], ScriptedTipWriter(family)
    try:
        return list(adapt(collector, tasks, memory, writer, trials=trials, temperature=0.4, scope=scope, seed=0))
    finally:
        collector.close()


def line(trials: list[Trial]) -> dict[str, Any]:
    return record(trials, iteration=0, split="test", memory="empty")


def test_a_failed_episode_is_no_zero_and_leaves_the_best_as_it_was():
    trials = adapted(CorridorFamily(3, {(1, 2): 1}), variations=2, trials=2)  # variation 1 dies once, in trial 1
    found = line(trials)
    assert [row["scores"] for row in found["rows"]] == [[3.0, 3.0], [None, 3.0]]
    assert found["rows"][1]["tips_shown"] == ["", ""] and found["rows"][1]["tips_written"][0] == ""
    assert (found["score"], found["best_score"], found["complete"]) == ([3.0, 3.0], [3.0, 3.0], False)


def test_a_trial_in_which_every_episode_failed_is_an_error():
    with pytest.raises(EnvError, match="adaptation, trial 2: all 1 episodes failed: died at step 1"):
        adapted(DiesLater(), variations=1, trials=3)


class DiesLater(CorridorFamily):
    """Its first episode goes well."""

    def __init__(self) -> None:
        super().__init__(3)

    def make(self) -> Any:
        if self.closed:
            self.failures[0, 1] = 1
        return super().make()


@pytest.mark.parametrize(("scope", "buffers"), [("variation", 2), ("task", 1), ("global", 1)])
def test_every_episode_acts_with_memory_and_writes_into_the_buffer_of_its_scope(scope: Scope, buffers: int):
    memory: TipMemory = empty_memory()
    trials = adapted(CorridorFamily(3), variations=2, trials=2, memory=memory, scope=scope)
    assert memory.metrics()["buffers"] == buffers and len(memory) > 0
    episodes = [episode for trial in trials for episode in trial.now.episodes]
    assert {episode.mode for episode in episodes} == {Mode.ON_POLICY_WITH_MEMORY}
    assert len({episode.id for episode in episodes}) == 4
