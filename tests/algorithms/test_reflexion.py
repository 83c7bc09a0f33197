"""The chain of trials: which reflections stay, when it ends, and that failures of the world teach nothing."""

from dataclasses import replace

import pytest

from empo2_jax.algorithms.reflexion import Chain
from empo2_jax.types import Episode, StopReason
from tests.fixtures.episodes import make_episode


def trial(tip: str, score: float = 0.0, **changes: object) -> Episode:
    return replace(make_episode(), tip=tip, score=score, success=score == 100.0, stop_reason=StopReason.DONE, **changes)


def chain(*episodes: Episode, kept: int = 3) -> Chain:
    result = Chain(make_episode().task)
    for episode in episodes:
        result = result.after(episode, kept)
    return result


def test_the_newest_reflections_stay_newest_first() -> None:
    last = make_episode().steps[-1].action
    found = chain(trial("a"), trial("b", 30.0), trial("c"), trial("d"))
    assert found.reflections == tuple(
        f"{tip} (action : {last} ; score : {score} )" for tip, score in [("d", 0), ("c", 0), ("b", 30)]
    )
    assert len(chain(trial("a"), trial("b"), kept=1).reflections) == 1
    assert chain(trial("a"), trial("")).reflections == chain(trial("a")).reflections


def test_the_best_episode_is_the_first_of_the_highest_score() -> None:
    episodes = [trial("a", 10.0), trial("b", 30.0), trial("c", 30.0), trial("d", 20.0)]
    found = chain(*episodes)
    assert found.best is episodes[1]
    assert found.newest is episodes[3]


@pytest.mark.parametrize("reason", [StopReason.ENV_ERROR, StopReason.ENGINE_ERROR])
def test_an_invalid_episode_teaches_nothing(reason: StopReason) -> None:
    before = chain(trial("a", 30.0))
    assert before.after(replace(trial("b", 100.0), stop_reason=reason), 3) is before


def test_a_success_ends_the_chain() -> None:
    assert [chain().solved, chain(trial("a", 99.0)).solved, chain(trial("a", 100.0)).solved] == [False, False, True]
