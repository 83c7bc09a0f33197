"""The learning rate of a run, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from empo2_jax.config import UpdateConfig
from empo2_jax.learner.optim import policy_rate


@pytest.mark.parametrize(("warmup", "rates"), [(0, [2e-6] * 4), (1, [2e-6] * 4), (4, [5e-7, 1e-6, 1.5e-6, 2e-6])])
def test_rate_is_constant_after_a_linear_warm_up(warmup: int, rates: list[float]) -> None:
    rate = policy_rate(UpdateConfig(learning_rate=2e-6, warmup_updates=warmup))
    assert [float(rate(updates)) for updates in range(4)] == pytest.approx(rates)


def test_steps_of_a_tiny_rate_are_lost_in_bf16_and_not_in_f32() -> None:
    weights = np.random.default_rng(0).normal(0.0, 0.02, 100_000).astype(np.float32)  # of a usual matrix
    for dtype, least, most in ((jnp.bfloat16, 0.98, 1.0), (jnp.float32, 0.0, 0.0)):
        old = jnp.asarray(weights, dtype)
        lost = float((old - jnp.asarray(1e-6, dtype) == old).mean())
        assert least <= lost <= most
