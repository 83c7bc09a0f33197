"""GiGPO by hand, in both normalizations; GRPO where the step term is off or has nothing to compare."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from empo2_jax.algorithms import gigpo, grpo
from empo2_jax.algorithms.base import group_metrics
from empo2_jax.config import AlgorithmConfig
from empo2_jax.types import EpisodeGroup, Mode, StopReason
from tests.fixtures.episodes import make_episode, make_group

PLAIN = AlgorithmConfig(name="gigpo", p_memory=0.0, advantage_std_floor=0.0, step_weight=0.5, step_discount=0.5)
POINTS = PLAIN.model_copy(update={"advantage_normalization": "none"})


def three() -> EpisodeGroup:
    """Returns 8, 2, 2; discounted by half (4, 8), (2, 0), (1, 2); two states are shared, `c` is not."""
    return make_group(
        make_episode([[5], [6]], rewards=[0.0, 8.0], anchors=["a", "b"]),
        make_episode([[5], [6]], rewards=[2.0, 0.0], anchors=["a", "c"]),
        make_episode([[5], [6]], rewards=[0.0, 2.0], anchors=["a", "b"]),
    )


def test_by_hand_with_the_deviation() -> None:
    whole = np.array([4.0, -2.0, -2.0]) / 12**0.5  # mean 4, variance (16 + 4 + 4) / 2
    at_a = np.array([5.0, -1.0, -4.0]) / 3 / (7 / 3) ** 0.5  # mean 7/3, variance (25 + 1 + 16) / 9 / 2
    at_b = 0.5**0.5  # 8 and 2: ±3, deviation √18
    expected = [
        [whole[0] + 0.5 * at_a[0], whole[0] + 0.5 * at_b],
        [whole[1] + 0.5 * at_a[1], whole[1]],
        [whole[2] + 0.5 * at_a[2], whole[2] - 0.5 * at_b],
    ]
    np.testing.assert_allclose(gigpo.advantages([three()], PLAIN), expected, rtol=1e-5)


def test_by_hand_without_the_deviation_in_either_term() -> None:
    expected = [[4 + 0.5 * 5 / 3, 4 + 0.5 * 3], [-2 - 0.5 / 3, -2], [-2 - 0.5 * 4 / 3, -2 - 0.5 * 3]]
    np.testing.assert_allclose(gigpo.advantages([three()], POINTS), expected, rtol=1e-12)


def test_a_state_visited_twice_in_one_episode_is_compared_with_itself() -> None:
    walk = make_episode([[5], [6], [7]], rewards=[0.0, 0.0, 4.0], anchors=["a", "b", "a"])  # G = 1, 2, 4
    found = gigpo.step_advantages(make_group(walk), POINTS)
    np.testing.assert_allclose(found, [[-1.5, 0, 1.5]])


def test_episodes_of_equal_returns_are_told_apart_by_their_steps() -> None:
    slow = make_episode([[5], [6]], rewards=[0.0, 8.0], anchors=["a", "b"])  # G = 4, 8; at `a` the mean is 6
    tied = make_group(slow, make_episode([[5]], rewards=[8.0], anchors=["a"]))
    assert group_metrics([tied])["group/all_equal"] == 1.0
    assert [values.tolist() for values in grpo.advantages([tied], POINTS)] == [[0.0, 0.0], [0.0]]
    assert [values.tolist() for values in gigpo.advantages([tied], POINTS)] == [[-1.0, 0.0], [1.0]]


def test_groups_are_apart_and_invalid_episodes_are_out() -> None:
    dead = make_episode([[5]], rewards=[900.0], anchors=["a"], stop_reason=StopReason.ENV_ERROR)
    first = make_group(make_episode([[5]], rewards=[1.0], anchors=["a"]), dead)
    second = make_group(make_episode([[5]], rewards=[7.0], anchors=["a"]))
    assert [values.tolist() for values in gigpo.advantages([first, second], PLAIN)] == [[0.0], [0.0]]


def test_the_floor_holds_in_both_terms() -> None:
    floored = PLAIN.model_copy(update={"advantage_std_floor": 100.0})
    in_points = gigpo.advantages([three()], POINTS)
    np.testing.assert_allclose(gigpo.advantages([three()], floored), np.array(in_points) / 100, rtol=1e-12)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(-100, 100), st.sampled_from("abc")), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(["std", "none"]),
)
def test_without_weight_it_is_grpo_and_step_advantages_cancel_by_state(
    episodes: list[list[tuple[int, str]]], normalization: str
) -> None:
    group = make_group(
        *(
            make_episode([[5]] * len(steps), rewards=[float(r) for r, _ in steps], anchors=[a for _, a in steps])
            for steps in episodes
        )
    )
    config = PLAIN.model_copy(update={"step_weight": 0.0, "advantage_normalization": normalization})
    for ours, theirs in zip(gigpo.advantages([group], config), grpo.advantages([group], config), strict=True):
        assert ours.tolist() == theirs.tolist()
    sums = dict.fromkeys("abc", 0.0)
    for steps, values in zip(episodes, gigpo.step_advantages(group, config), strict=True):
        for (_, anchor), value in zip(steps, values, strict=True):
            sums[anchor] += value
    assert list(sums.values()) == pytest.approx([0, 0, 0], abs=1e-9)


def test_every_episode_acts_without_tips() -> None:
    assert {gigpo.draw_mode(PLAIN, 0, i, 0, i) for i in range(50)} == {Mode.ON_POLICY}
