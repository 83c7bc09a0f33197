"""The panel: means over repeats, then variations, then tasks; failures make it incomplete and never count as 0."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from empo2_jax.config import EvaluationConfig
from empo2_jax.envs import toy
from empo2_jax.evaluation import evaluate, summarize
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.types import Episode, StopReason, Task
from tests.fixtures.episodes import make_episode
from tests.fixtures.worlds import CorridorFamily, babble, make_collector, spoken, word_chat


def episode(task: str, variation: int, score: float, reason: StopReason = StopReason.DONE) -> Episode:
    return dataclasses.replace(
        make_episode(stop_reason=reason), task=Task("toy", task, variation), score=score, success=score == 100.0
    )


def test_means_go_over_repeats_then_variations_then_tasks():
    panel = summarize(
        [
            *(episode("a", 0, score) for score in (100.0, 100.0, 40.0, 0.0)),  # mean 60, success 1/2
            episode("a", 1, 20.0),  # task a: 40, 1/4
            episode("b", 0, 100.0),  # task b: 100, 1
        ]
    )
    assert panel.score == pytest.approx(70.0)
    assert panel.success == pytest.approx(0.625)
    assert panel.complete
    assert panel.rows == [
        {"task": "a", "variation": 0, "scores": [100.0, 100.0, 40.0, 0.0], "success": 0.5},
        {"task": "a", "variation": 1, "scores": [20.0], "success": 0.0},
        {"task": "b", "variation": 0, "scores": [100.0], "success": 1.0},
    ]
    assert panel.record("start", 3, "test")["score"] == panel.score


@pytest.mark.parametrize("reason", [StopReason.ENV_ERROR, StopReason.ENGINE_ERROR])
def test_a_failed_episode_makes_the_panel_incomplete_and_is_no_zero(reason: StopReason):
    panel = summarize([episode("a", 0, 80.0), episode("a", 0, 0.0, reason), episode("a", 1, 0.0, reason)])
    assert (panel.score, panel.complete, len(panel.episodes)) == (80.0, False, 3)
    nothing = summarize([episode("a", 0, 0.0, reason)])
    assert math.isnan(nothing.score) and math.isnan(nothing.success) and not nothing.complete


@pytest.mark.parametrize("reason", [StopReason.STEP_LIMIT, StopReason.LENGTH])
def test_limits_are_valid_ends(reason: StopReason):
    assert summarize([episode("a", 0, 30.0, reason)]).complete


def test_negative_scores_count_as_they_are():
    assert summarize([episode("a", 0, -100.0), episode("a", 0, 50.0)]).score == -25.0


def test_valid_actions_is_the_share_of_accepted_actions():
    good = episode("a", 0, 0.0)
    step = good.steps[0]
    refused = dataclasses.replace(step, resolution="invalid")
    assert summarize([dataclasses.replace(good, steps=(step, refused, refused, refused))]).valid_actions == 0.25
    assert summarize([dataclasses.replace(good, steps=())]).valid_actions == 0.0


def panel_of(family: Any, script: Any, **config: Any) -> Any:
    collector = make_collector(ReplayEngine(script), family, step_limit=3)
    try:
        return evaluate(collector, family, EvaluationConfig(**config))
    finally:
        collector.close()


def drawn(episodes: Sequence[Episode]) -> dict[str, list[list[int]]]:
    return {item.id: [step.action_ids.tolist() for step in item.steps] for item in episodes}


def test_panel_is_the_first_variations_with_fixed_draws():
    small = panel_of(toy.family(variations=2), babble(word_chat()), variations=2, repeats=2)
    large = panel_of(toy.family(variations=3), babble(word_chat()), variations=20, repeats=3)
    assert [item.task.variation for item in small.episodes] == [0, 0, 1, 1]
    assert len(large.episodes) == 9
    assert drawn(small.episodes).items() <= drawn(large.episodes).items()
    assert len({str(actions) for actions in drawn(large.episodes).values()}) == 9
    assert all(not item.tip and not step.tips for item in large.episodes for step in item.steps)


def test_panel_scores_the_environments_own_points():
    place, _ = toy.SECRETS[1]
    said = spoken(word_chat(), lambda request: f"look in the {place}")
    panel = panel_of(toy.family(variations=2), said, variations=2, repeats=2)
    # house 1 gives 30 for the bulb and refuses to be searched again; house 0 is searched three times in vain
    assert (panel.score, panel.success, panel.complete) == (15.0, 0.0, True)
    assert panel.valid_actions == pytest.approx((3 + 1) / 6)


def test_panel_of_a_world_that_dies_is_incomplete():
    panel = panel_of(CorridorFamily(3, {(1, 0): 99}), babble(word_chat()), variations=2, repeats=1)
    assert not panel.complete
