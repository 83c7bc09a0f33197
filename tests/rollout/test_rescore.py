"""Choosing among samples: what is asked, what becomes the step, and that lone failures do no harm."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from empo2_jax.errors import EngineError
from empo2_jax.rollout.base import Completion, Request
from empo2_jax.rollout.collect import Assignment
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.rollout.rescore import ChoosingCollector
from empo2_jax.types import Proposals, StopReason
from tests.fixtures.worlds import CorridorFamily, corridor, make_collector, spoken, word_chat

WORDS = ("look in the oven", "look in the vase", "look in the oven")


def by_session(request: Request) -> str:
    """The candidate's number decides."""
    return WORDS[int(request.session.partition("#")[2] or 0)]


class Last:
    """Takes the last proposal."""

    def __init__(self) -> None:
        self.asked: list[Proposals] = []

    def choose(self, asked: Sequence[Proposals]) -> list[int]:
        self.asked += asked
        return [len(item.answers) - 1 for item in asked]


class Failing(ReplayEngine):
    """Answers some sessions with an error."""

    def __init__(self, *arguments: Any, fails: Sequence[str]):
        super().__init__(*arguments)
        self.fails = fails

    def generate(self, requests: Sequence[Request]) -> list[Completion | EngineError]:
        found = super().generate(requests)
        broken = [any(request.session.endswith(end) for end in self.fails) for request in requests]
        return [EngineError("broken") if bad else item for bad, item in zip(broken, found, strict=True)]


def collected(fails: Sequence[str] = ()) -> tuple[Any, Last]:
    chooser, engine = Last(), Failing(spoken(word_chat(), by_session), fails=fails)
    one = partial(ChoosingCollector, chooser, 3)
    collector = make_collector(engine, CorridorFamily(2), step_limit=9, retries=0, one=one)
    (episode,) = collector.collect([Assignment("e", corridor())], temperature=1.0)
    collector.close()
    return episode, chooser


def test_the_chosen_sample_is_the_step() -> None:
    episode, chooser = collected()
    assert [item.answers for item in chooser.asked] == [("look in the oven", "look in the vase")] * 2
    assert [(item.step, item.state) for item in chooser.asked] == [
        (0, episode.steps[0].anchor),
        (1, episode.steps[1].anchor),
    ]
    assert [step.action for step in episode.steps] == ["look in the vase"] * 2
    follows = episode.steps[1].prompt_ids
    acted = np.concatenate([episode.steps[0].prompt_ids, episode.steps[0].action_ids])
    np.testing.assert_array_equal(follows[: len(acted)], acted)


def test_a_failed_sample_is_no_proposal_and_only_all_failures_end_the_episode() -> None:
    episode, _ = collected(fails=["#1"])
    assert [step.action for step in episode.steps] == ["look in the oven"] * 2
    episode, chooser = collected(fails=["e", "#1", "#2"])
    assert (episode.stop_reason, episode.error, chooser.asked) == (StopReason.ENGINE_ERROR, "broken", [])
