"""Packing loses no token, and the loss, its gradient and its metrics do not see packing, order or micro-batches.

The model is log-linear in the previous token and the position, so it also sees a wrong position or a leak over a
segment's edge. Denominators differ from the current log-probs: ratios are not 1.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2_jax.data.packing import pack, unpack
from empo2_jax.data.rows import build_rows, token_weights
from empo2_jax.ops.losses import policy_loss
from empo2_jax.types import Episode, Mode, Row, TrainBatch
from tests.fixtures.episodes import make_episode

VOCABULARY, LONGEST = 100, 32
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "episode-mean")
PARAMETERS = {
    "table": jax.random.normal(jax.random.key(0), (VOCABULARY, VOCABULARY)),
    "position": jax.random.normal(jax.random.key(1), (LONGEST, VOCABULARY)),
}


def loss(parameters: dict[str, jax.Array], batch: TrainBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
    previous = jnp.pad(batch.token_ids, ((0, 0), (1, 0)))[:, :-1]
    table = jax.nn.log_softmax(parameters["table"][previous] + parameters["position"][batch.positions])
    logprobs = jnp.take_along_axis(table, batch.token_ids[..., None], -1)[..., 0]
    entropy = -(jnp.exp(table) * table).sum(-1)
    return policy_loss(
        logprobs, entropy, batch, clip_low=0.2, clip_high=0.3, dual_clip=3.0, kl_coefficient=0.05,
        entropy_coefficient=0.01,
    )  # fmt: skip


@jax.jit
def loss_and_gradient(batch: TrainBatch) -> tuple[tuple[jax.Array, dict[str, jax.Array]], dict[str, jax.Array]]:
    return jax.value_and_grad(loss, has_aux=True)(PARAMETERS, batch)


def total(batches: list[TrainBatch]):
    return jax.tree.map(lambda *parts: sum(parts), *map(loss_and_gradient, batches))


# Drawn as plain values: the run-time type checker of the tests may not run inside a strategy.
actions = st.lists(st.lists(st.integers(20, 80), min_size=1, max_size=4), min_size=1, max_size=4)
drawings = st.lists(st.tuples(actions, st.sampled_from(Mode), st.booleans()), min_size=1, max_size=6)


def built(drawing: list[tuple[list[list[int]], Mode, bool]]) -> list[Episode]:
    return [make_episode(actions, mode=mode, rebuilt=rebuilt) for actions, mode, rebuilt in drawing]


def filled(rows: list[Row], seed: int) -> list[Row]:
    """Random ledgers near the range of the model, so that some tokens are clipped, some masked, some neither."""
    random = np.random.default_rng(seed)
    draw = lambda row, low, high: random.uniform(low, high, len(row.token_ids)).astype(np.float32)  # noqa: E731
    return [
        dataclasses.replace(
            row,
            denominator_logprobs=draw(row, -7, -4),
            reference_logprobs=draw(row, -7, -4),
            rollout_weight=draw(row, 0.5, 2),
        )
        for row in rows
    ]


@given(drawings, st.sampled_from([(32,), (8, 32), (4, 8, 16, 32)]))
def test_packing_loses_no_token(drawing, buckets) -> None:
    rows = build_rows(built(drawing), [1.0] * len(drawing))
    packed = pack(rows, buckets, 64)
    assert sum(int((batch.segment_ids > 0).sum()) for batch in packed.batches) == sum(len(r.token_ids) for r in rows)
    back = unpack([batch.token_ids.astype(np.float32) for batch in packed.batches], packed.placements)
    masks = unpack([batch.loss_mask.astype(np.float32) for batch in packed.batches], packed.placements)
    for row, ids, mask in zip(rows, back, masks, strict=True):
        np.testing.assert_array_equal(ids, row.token_ids)
        np.testing.assert_array_equal(mask, row.loss_mask)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(
    drawing=drawings,
    buckets=st.sampled_from([(32,), (16, 32)]),
    tokens=st.sampled_from([32, 64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=8)
def test_loss_gradient_and_metrics_do_not_see_the_packing(aggregation, drawing, buckets, tokens, seed) -> None:
    random = np.random.default_rng(seed)
    rows = build_rows(built(drawing), random.normal(size=len(drawing)).tolist(), min_token_prob=0.005, mask_modes="all")
    rows = token_weights(filled(rows, seed), aggregation)
    alone = total([batch for row in rows for batch in pack([row], (32,), 32).batches])
    shuffled = [rows[i] for i in random.permutation(len(rows))]
    together = total(pack(shuffled, buckets, tokens).batches)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), together, alone)


def test_the_example_has_ratios_away_from_one_and_clipped_and_masked_tokens() -> None:
    drawn = [make_episode([[20 + i, 40 + i, 60 + i]] * 3, mode=Mode(i % 3)) for i in range(6)]
    rows = build_rows(drawn, [1.0, -1.0] * 3, min_token_prob=0.005, mask_modes="all")
    (_, sums), _ = total(pack(token_weights(filled(rows, 0), "token-mean"), (32,), 64).batches)
    shares = {name: float(sums[name].sum() / sums["tokens"].sum()) for name in ("clipped", "masked")}
    assert 0.1 < shares["clipped"] < 0.9
    assert 0.1 < shares["masked"] < 0.9
    assert abs(float(sums["ratio"].sum() / sums["tokens"].sum()) - 1) > 0.1


def test_averaging_micro_batch_means_would_differ() -> None:
    drawn = [make_episode([[20, 21]]), make_episode([[30], [31], [32, 33, 34]])]
    rows = filled(build_rows(drawn, [1.0, -2.0]), 1)
    whole = total(pack(token_weights(rows, "token-mean"), (32,), 64).batches)[0][0]
    means = [total(pack(token_weights([row], "token-mean"), (32,), 32).batches)[0][0] for row in rows]
    assert abs(float(whole) - float(sum(means)) / 2) > 1e-3
