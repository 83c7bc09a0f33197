"""Which episodes count, and what the groups say about themselves."""

from dataclasses import replace

import pytest

from empo2_jax.algorithms.base import anchor_groups, group_metrics, relative_advantages, valid_episodes
from empo2_jax.config import AlgorithmConfig
from empo2_jax.types import Episode, Mode, StopReason
from tests.fixtures.episodes import make_episode, make_group, per_episode


def scored(reward: float, novelty: float = 0.0, mode: Mode = Mode.ON_POLICY, stop: StopReason = StopReason.DONE):
    return make_episode(rewards=[reward], intrinsic=[novelty], mode=mode, stop_reason=stop)


def test_metrics_by_hand() -> None:
    equal = make_group(scored(5.0), scored(5.0))
    phantom = make_group(scored(0.0, 1.0), scored(0.0, 0.5))
    real = make_group(scored(0.0), scored(30.0, mode=Mode.OFF_POLICY), scored(0.0, stop=StopReason.STEP_LIMIT))
    alone = make_group(scored(100.0), scored(-999.0, stop=StopReason.ENV_ERROR))
    assert group_metrics([equal, phantom, real, alone]) == pytest.approx(
        {
            "episode/invalid": 1 / 9,
            "reward/mean": 140 / 8,
            "reward/std": ((25 * 2 + 900 + 10000) / 8 - (140 / 8) ** 2) ** 0.5,
            "reward/intrinsic_mean": 1.5 / 8,
            "episode/score": 140 / 8,
            "episode/success_rate": 7 / 8,
            "episode/length": 1.0,
            "empo2/on/reward": 110 / 7,
            "empo2/on/share": 7 / 8,
            "empo2/off/reward": 30.0,
            "empo2/off/share": 1 / 8,
            "group/all_equal": 1 / 3,
            "group/phantom": 1 / 3,
            "novelty/bonus_mean": 1.5 / 8,
        }
    )


def shown(episode: Episode) -> Episode:
    """The episode saw a tip at its last step."""
    *steps, last = episode.steps
    return replace(episode, steps=(*steps, replace(last, tips=("look in the vase",))))


def test_utility_is_what_members_with_tips_have_more_than_the_others_of_their_group() -> None:
    helped = make_group(shown(scored(100.0)), shown(scored(30.0)), scored(30.0), scored(0.0))  # 65 - 15
    misled = make_group(shown(scored(0.0, 9.0)), scored(10.0), scored(70.0, stop=StopReason.ENV_ERROR))  # 0 - 10
    unseen = make_group(scored(30.0, mode=Mode.OFF_POLICY), scored(0.0))  # acted with memory, found no tip
    always = make_group(shown(scored(100.0)), shown(scored(100.0)))
    assert group_metrics([helped, misled, unseen, always])["memory/utility"] == pytest.approx((50 - 10) / 2)
    assert "memory/utility" not in group_metrics([unseen, always])


def test_length_of_tips_is_that_of_the_written_ones() -> None:
    group = make_group(*(replace(scored(1.0), tip_tokens=length) for length in (4, 9, 0)))
    assert group_metrics([group])["memory/tip_tokens"] == 6.5
    assert "memory/tip_tokens" not in group_metrics([make_group(scored(1.0), scored(2.0))])


def test_novelty_bonus_is_per_step() -> None:
    group = make_group(make_episode([[5], [6]], rewards=[0.0, 0.0], intrinsic=[1.0, 0.5]), scored(0.0, 0.3))
    assert group_metrics([group])["novelty/bonus_mean"] == pytest.approx(1.8 / 3)


def test_without_valid_episodes_there_is_no_reward_rather_than_zero() -> None:
    assert group_metrics([make_group(scored(1.0, stop=StopReason.ENGINE_ERROR))]) == {"episode/invalid": 1.0}
    assert group_metrics([]) == {}


def test_advantages_stand_in_the_order_of_the_valid_episodes() -> None:
    groups = [
        make_group(scored(0.0), scored(7.0, stop=StopReason.ENV_ERROR), scored(2.0)),
        make_group(scored(4.0), scored(4.0)),
    ]
    found = relative_advantages(
        groups, AlgorithmConfig(advantage_std_floor=0.0), lambda episode: episode.extrinsic_return
    )
    assert [episode.extrinsic_return for episode in valid_episodes(groups)] == [0.0, 2.0, 4.0, 4.0]
    assert per_episode(found) == pytest.approx([-(0.5**0.5), 0.5**0.5, 0, 0], rel=1e-5)


def test_advantages_have_a_value_per_step() -> None:
    group = make_group(make_episode([[5], [6], [7]], rewards=[1.0, 0.0, 1.0]), make_episode([[5]], rewards=[0.0]))
    config = AlgorithmConfig(advantage_normalization="none")
    found = relative_advantages([group], config, lambda episode: episode.extrinsic_return)
    assert [values.tolist() for values in found] == [[1.0, 1.0, 1.0], [-1.0]]


def test_steps_that_began_in_the_same_state_are_found_over_the_group() -> None:
    group = make_group(
        make_episode([[5]] * 3, anchors=["a", "b", "a"]),
        make_episode([[5]] * 2, anchors=["a", "b"], stop_reason=StopReason.ENV_ERROR),
        make_episode([[5]] * 2, anchors=["a", "b"], mode=Mode.OFF_POLICY),
        make_episode([[5]] * 3, anchors=["c", "b", ""]),
    )
    assert anchor_groups(group) == [[(0, 0), (0, 2)], [(0, 1), (2, 1)], [(2, 0)]]
    assert group_metrics([group])["group/shared_states"] == pytest.approx(4 / 5)
