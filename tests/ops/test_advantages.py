"""Hand-computed advantages, and invariances of the normalization."""

import numpy as np
import pytest

from empo2_jax.ops.advantages import discounted_returns, group_advantages

ALL = np.array([True, True, True, True])
PLAIN = np.zeros(4, np.int64)


def test_hand_computed_group() -> None:
    # mean 3, deviations -3 -1 1 3, ddof 1: std = sqrt(20 / 3)
    found = group_advantages(np.array([0.0, 2.0, 4.0, 6.0]), ALL, PLAIN)
    np.testing.assert_allclose(found, np.array([-3, -1, 1, 3]) / (np.sqrt(20 / 3) + 1e-6), rtol=1e-12)


def test_invalid_members_count_for_nothing() -> None:
    valid = np.array([True, False, True, False])
    found = group_advantages(np.array([1.0, 1e9, 3.0, -1e9]), valid, PLAIN, eps=0.0)
    np.testing.assert_allclose(found, [-1 / np.sqrt(2), 0, 1 / np.sqrt(2), 0], rtol=1e-12)


@pytest.mark.parametrize("valid", [[True, False, False, False], [False] * 4])
def test_fewer_than_two_valid_members_give_zero(valid: list[bool]) -> None:
    assert not group_advantages(np.array([5.0, 1.0, 2.0, 3.0]), np.array(valid), PLAIN).any()


def test_equal_returns_give_exactly_zero() -> None:
    assert not group_advantages(np.full(4, 0.1), ALL, PLAIN).any()


def test_std_floor_shrinks_small_differences_and_leaves_large_ones() -> None:
    small = group_advantages(np.array([0.0, 0.0, 0.0, 1.0]), ALL, PLAIN, std_floor=5.0)  # std 0.5
    np.testing.assert_allclose(small, [-0.05, -0.05, -0.05, 0.15], rtol=1e-12)
    large = np.array([0.0, 0.0, 0.0, 100.0])  # std 50
    np.testing.assert_array_equal(
        group_advantages(large, ALL, PLAIN, std_floor=5.0), group_advantages(large, ALL, PLAIN)
    )


def test_mode_baseline_compares_plain_with_plain_and_tips_with_tips() -> None:
    returns, modes = np.array([0.0, 2.0, 10.0, 30.0]), np.array([0, 0, 1, 2])
    found = group_advantages(returns, ALL, modes, baseline="mode", eps=0.0)
    half = 1 / np.sqrt(2)
    np.testing.assert_allclose(found, [-half, half, -half, half], rtol=1e-12)


def test_mode_baseline_falls_back_to_the_group_for_a_part_of_one() -> None:
    returns, modes = np.array([0.0, 2.0, 4.0, 6.0]), np.array([0, 0, 0, 2])
    found = group_advantages(returns, ALL, modes, baseline="mode", eps=0.0)
    np.testing.assert_allclose(found, [-1, 0, 1, 3 / np.sqrt(20 / 3)], rtol=1e-12)


def test_shift_and_scale_invariant_and_centered() -> None:
    returns = np.random.default_rng(0).normal(size=4)
    base = group_advantages(returns, ALL, PLAIN, eps=0.0)
    np.testing.assert_allclose(group_advantages(7 * returns + 100, ALL, PLAIN, eps=0.0), base, rtol=1e-10)
    assert abs(base.sum()) < 1e-12
    assert base.std(ddof=1) == pytest.approx(1.0)


def test_without_normalization_the_mean_alone_goes() -> None:
    found = group_advantages(np.array([0.0, 2.0, 4.0, 6.0]), ALL, PLAIN, normalization="none", std_floor=5.0)
    assert found.tolist() == [-3, -1, 1, 3]


def test_discounted_returns_by_hand() -> None:
    rewards = np.array([1.0, 0.0, -4.0, 8.0])
    assert discounted_returns(rewards, 0.5).tolist() == [1.0, 0.0, 0.0, 8.0]
    assert discounted_returns(rewards, 1.0).tolist() == [5.0, 4.0, 4.0, 8.0]
    assert discounted_returns(rewards, 0.0).tolist() == rewards.tolist()
    assert discounted_returns(np.zeros(0), 0.9).tolist() == []
