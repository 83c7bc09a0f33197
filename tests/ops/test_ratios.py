"""Ratios by hand, and their limits."""

import jax
import jax.numpy as jnp
import numpy as np

from empo2_jax.ops.ratios import importance_ratio, truncated_rollout_weight


def test_importance_ratio_by_hand() -> None:
    found = importance_ratio(jnp.log(jnp.array([0.5, 0.2, 0.3])), jnp.log(jnp.array([0.25, 0.4, 0.3])))
    np.testing.assert_allclose(found, [2.0, 0.5, 1.0], rtol=1e-6)


def test_importance_ratio_is_finite_far_away_and_has_no_gradient_there() -> None:
    value, slope = jax.value_and_grad(lambda x: importance_ratio(x, jnp.array(-200.0)))(jnp.array(0.0))
    np.testing.assert_allclose(value, np.exp(20.0), rtol=1e-5)
    assert slope == 0.0


def test_gradient_at_equality_is_that_of_the_logprob() -> None:
    assert jax.grad(lambda x: importance_ratio(x, jnp.array(-1.5)))(jnp.array(-1.5)) == 1.0


def test_rollout_weight_is_capped_above_and_not_below() -> None:
    acting, behavior = (
        np.log(np.array([0.9, 0.3, 0.2, 0.01], np.float32)),
        np.log(np.array([0.1, 0.2, 0.2, 0.1], np.float32)),
    )
    np.testing.assert_allclose(truncated_rollout_weight(acting, behavior, 2.0), [2.0, 1.5, 1.0, 0.1], rtol=1e-5)


def test_rollout_weight_of_impossible_tokens_stays_finite() -> None:
    far = truncated_rollout_weight(np.array([-1e9, 0.0], np.float32), np.array([0.0, -1e9], np.float32))
    np.testing.assert_allclose(far, [np.exp(-20), 2.0], rtol=1e-5)
    assert far.dtype == np.float32
