"""Implicit Q-learning by hand: the loss of a few differences, whose minimum it has, and targets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empo2_jax.ops.iql import expectile_loss, td_target


def test_losses_by_hand() -> None:
    differences = jnp.array([2.0, -2.0, 0.0, 0.5])
    np.testing.assert_allclose(expectile_loss(differences, 0.7), [2.8, 1.2, 0.0, 0.175], rtol=1e-6)
    np.testing.assert_allclose(expectile_loss(differences, 0.5), 0.5 * np.square(differences), rtol=1e-6)


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.9])
def test_the_expectile_of_a_fair_coin_is_its_level(expectile: float) -> None:
    """For values 0 and 1: τ(1 − m) = (1 − τ)m, so m = τ."""
    coin = jnp.array([0.0, 1.0])
    slope = jax.grad(lambda m: expectile_loss(coin - m[None], expectile).mean())
    assert abs(float(slope(jnp.float32(expectile)))) < 1e-6
    assert float(slope(jnp.float32(expectile - 0.1))) < 0 < float(slope(jnp.float32(expectile + 0.1 - 1e-3)))


def test_nothing_follows_an_end() -> None:
    rewards, following = jnp.array([1.0, 0.5]), jnp.array([10.0, 10.0])
    np.testing.assert_allclose(td_target(rewards, jnp.array([True, False]), following, 0.99), [1.0, 10.4])
