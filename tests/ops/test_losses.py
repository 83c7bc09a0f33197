"""The loss token by token, by hand; identities with the policy gradient; metrics that add up."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empo2_jax.data.packing import pack
from empo2_jax.data.rows import build_rows, token_weights
from empo2_jax.ops.losses import clipped_surrogate, finalize_metrics, k3_divergence, policy_loss
from empo2_jax.types import Mode, TrainBatch
from tests.fixtures.episodes import make_episode

CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}


def batch_of(advantages: list[float], old: list[float], *, mode: Mode = Mode.ON_POLICY, threshold: float = 0.0):
    """One row with one prompt token and one action token per value, weight 1 each."""
    T = len(advantages) + 1
    row = lambda values, dtype: np.asarray([[0, *values]], dtype)  # noqa: E731
    return TrainBatch(
        token_ids=np.zeros((1, T), np.int32),
        segment_ids=np.ones((1, T), np.int32),
        positions=np.arange(T, dtype=np.int32)[None],
        loss_mask=row([1] * (T - 1), bool),
        advantages=row(advantages, np.float32),
        denominator_logprobs=row(old, np.float32),
        rollout_weight=np.ones((1, T), np.float32),
        token_weight=row([1] * (T - 1), np.float32),
        mask_threshold=np.full((1, T), threshold, np.float32),
        reference_logprobs=np.zeros((1, T), np.float32),
        mode=np.full((1, T), mode, np.int8),
    )


def values(*logprobs: float, first: float = 0.0) -> jax.Array:
    return jnp.array([[first, *logprobs]], jnp.float32)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.6),  # clipped at 1.3
        (0.5, 2.0, -1.0),  # the pessimistic branch
        (0.5, -2.0, 1.6),  # clipped at 0.8
        (1.5, -2.0, 3.0),  # not clipped from above …
        (9.0, -2.0, 6.0),  # … except by the dual clip c = 3
        (9.0, 0.0, 0.0),
    ],
)
def test_surrogate_by_hand(ratio: float, advantage: float, loss: float) -> None:
    for function in (clipped_surrogate, jax.jit(clipped_surrogate, static_argnames=tuple(CLIP))):
        assert function(jnp.array([ratio]), jnp.array([advantage]), **CLIP)[0] == pytest.approx(loss)


def test_k3_by_hand_zero_at_equality_and_bounded() -> None:
    found = k3_divergence(jnp.array([-1.0, -1.0, -50.0]), jnp.array([-1.0, -2.0, 0.0]))
    np.testing.assert_allclose(found, [0.0, np.exp(-1.0), 10.0], rtol=1e-6)


def test_gradient_at_ratio_one_is_the_policy_gradient() -> None:
    logprobs, batch = values(-1.0, -2.0), batch_of([2.0, -3.0], [-1.0, -2.0])
    gradient = jax.grad(lambda x: policy_loss(x, jnp.zeros_like(x), batch, **CLIP)[0])(logprobs)
    np.testing.assert_allclose(gradient, [[0.0, -2.0, 3.0]])


def test_whatever_stands_off_the_mask_is_ignored() -> None:
    batch = batch_of([2.0], [-1.0])
    for garbage in (np.nan, -np.inf, 50.0):
        loss, sums = policy_loss(values(-1.2, first=garbage), values(0.3, first=garbage), batch, **CLIP)
        assert loss == pytest.approx(-2.0 * np.exp(-0.2))
        assert all(np.isfinite(value).all() for value in sums.values())


def test_all_three_modes_are_one_loss() -> None:
    logprobs = values(-1.2, -0.4)
    losses = [
        policy_loss(logprobs, jnp.zeros_like(logprobs), batch_of([2.0, -1.0], [-1.0, -1.0], mode=mode), **CLIP)[0]
        for mode in Mode
    ]
    assert losses[0] == losses[1] == losses[2]


def test_metrics_by_hand() -> None:
    batch = batch_of([1.0, 1.0, -1.0, -1.0], [-1.0, -1.0, -1.0, -9.0], mode=Mode.OFF_POLICY, threshold=0.01)
    logprobs = values(-1.0, -0.5, -1.0, -9.0)  # ratios 1, e^0.5 (clipped), 1, 1 (masked)
    loss, sums = policy_loss(logprobs, values(0.4, 0.4, 0.4, 0.4), batch, **CLIP)
    metrics = finalize_metrics(jax.tree.map(lambda x: 2 * x, sums), updates=2)
    root = np.exp(0.5)
    assert loss == pytest.approx(-1.0 - 1.3 + 1.0)
    assert metrics["actor/pg_loss"] == pytest.approx(-1.3)
    assert metrics["actor/entropy"] == pytest.approx(0.4)
    assert metrics["actor/pg_clipfrac"] == metrics["empo2/off/clipfrac"] == 0.25
    assert metrics["empo2/off/masked"] == 0.25
    assert metrics["empo2/off/masked_negative"] == 0.5
    assert metrics["empo2/off/ratio"] == pytest.approx((3 + root) / 4)
    assert metrics["empo2/off/ess"] == pytest.approx((3 + root) ** 2 / (4 * (3 + root**2)))
    assert metrics["empo2/off/logprob_gap"] == pytest.approx(0.125)
    assert metrics["empo2/off/entropy"] == pytest.approx(0.4)
    assert not [name for name in metrics if name.startswith(("empo2/on/", "empo2/on_memory/"))]


def test_empty_micro_batch_adds_nothing() -> None:
    (row,) = token_weights(build_rows([make_episode()], [1.0]), "token-mean")
    (batch,) = pack([dataclasses.replace(row, token_weight=0 * row.token_weight)], [8], 16).batches
    empty = batch._replace(loss_mask=np.zeros_like(batch.loss_mask))
    loss, sums = policy_loss(jnp.full((2, 8), jnp.nan), jnp.full((2, 8), jnp.nan), empty, **CLIP)
    assert loss == 0
    assert not any(np.asarray(value).any() for value in sums.values())
    assert finalize_metrics(sums)["actor/entropy"] == 0
