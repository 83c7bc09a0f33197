"""The pinned semantics of the method, by number: small episodes and numbers worked out by hand."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empo2_jax.algorithms import empo2, gigpo
from empo2_jax.algorithms.base import group_metrics, relative_advantages
from empo2_jax.config import AlgorithmConfig
from empo2_jax.data.packing import pack, unpack
from empo2_jax.data.rows import acting_rows, build_rows, minibatches, token_weights, transfer
from empo2_jax.ops.losses import policy_loss
from empo2_jax.ops.ratios import truncated_rollout_weight
from empo2_jax.randomness import generator
from empo2_jax.types import Mode, Row, StopReason, TrainBatch
from tests.fixtures.episodes import TIP_ID, make_episode, make_group, per_episode

CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 10.0}


def f32(values: Sequence[float]) -> np.ndarray:
    return np.asarray(values, np.float32)


def model_logprobs(row: Row) -> np.ndarray:
    """A policy that sees tips: −1 per token, −0.25 where a tip stands anywhere before it in the row."""
    seen = np.cumsum(row.token_ids == TIP_ID) > 0
    return np.where(seen, -0.25, -1.0).astype(np.float32)


def pack_one(row: Row) -> TrainBatch:
    (batch,) = pack([row], [16], 16).batches
    return batch


def loss_of(row: Row, logprobs: list[float], entropy: float = 0.0, **settings: Any) -> float:
    """Loss with the given log-probs on the action tokens of one row."""
    batch = pack_one(row)
    values = np.zeros((1, 16), np.float32)
    values[batch.loss_mask] = logprobs
    return float(policy_loss(jnp.asarray(values), jnp.full((1, 16), entropy), batch, **{**CLIP, **settings})[0])


def ready(advantage: float, old: list[float], mode: Mode = Mode.ON_POLICY, threshold: float = 0.0, **ledgers) -> Row:
    """One step with the given denominators and weight 1 per token."""
    (row,) = build_rows([make_episode([[5] * len(old)], mode=mode)], [advantage])
    place = lambda values: f32([*[0] * (len(row.token_ids) - len(old)), *values])  # noqa: E731
    return dataclasses.replace(
        row,
        token_weight=row.loss_mask.astype(np.float32),
        denominator_logprobs=place(old),
        mask_threshold=threshold,
        **{name: place(values) for name, values in ledgers.items()},
    )


@pytest.mark.parametrize(("denominator", "ratio"), [("student", 1.0), ("behavior", np.exp(-0.75))])
def test_01_denominator_is_under_the_loss_prompt_or_the_acting_prompt(denominator: str, ratio: float) -> None:
    episodes = [make_episode(mode=mode) for mode in Mode]
    rows, acting = build_rows(episodes, [1.0] * 3), acting_rows(episodes)
    logprobs = [model_logprobs(row) for row in rows]
    old = logprobs
    if denominator == "behavior":
        old = transfer(acting, [model_logprobs(row) for row in acting], rows, logprobs)
    rows = [dataclasses.replace(row, denominator_logprobs=values) for row, values in zip(rows, old, strict=True)]
    packed = pack(token_weights(rows, "token-mean"), [16], 64)
    (batch,) = packed.batches
    current = np.zeros(batch.token_ids.shape, np.float32)
    for values, at in zip(logprobs, packed.placements, strict=True):
        current[at.sequence, at.start : at.start + at.length] = values
    _, sums = policy_loss(jnp.asarray(current), jnp.zeros(current.shape), batch, **CLIP)
    mean_ratio = sums["ratio"] / sums["tokens"]
    np.testing.assert_allclose(mean_ratio, [1.0, 1.0, ratio], rtol=1e-6)
    assert [float(values[row.loss_mask][0]) for row, values in zip(rows, logprobs, strict=True)] == [-1, -0.25, -1]


def test_02_engine_correction_is_under_the_acting_prompt_and_spares_kl_and_entropy() -> None:
    episode = make_episode(mode=Mode.OFF_POLICY)
    rows, acting = build_rows([episode], [1.0]), acting_rows([episode])
    (acted,) = transfer(acting, [model_logprobs(row) for row in acting], rows, [np.zeros(4, np.float32)])
    behavior = f32([0, 0, -0.25, -0.25 - np.log(1.5)])  # the engine agrees under the tips, then is low by 1.5
    np.testing.assert_allclose(truncated_rollout_weight(acted, behavior)[2:], [1.0, 1.5], rtol=1e-6)

    row = ready(1.0, [-1.0], reference_logprobs=[-2.0])
    halved = dataclasses.replace(row, rollout_weight=np.full(3, 0.5, np.float32))
    settings: dict[str, Any] = {"kl_coefficient": 0.5, "entropy_coefficient": 0.1}
    side_terms = 0.5 * np.exp(-1.0) - 0.1 * 2.0
    assert loss_of(row, [-1.0], 2.0, **settings) == pytest.approx(-1.0 + side_terms)
    assert loss_of(halved, [-1.0], 2.0, **settings) == pytest.approx(-0.5 + side_terms)


def test_03_minibatches_take_whole_shuffled_episodes_until_the_count() -> None:
    steps = [4, 3, 2, 6, 1, 5]
    order = generator(0, "minibatches", 7).permutation(6)
    found = minibatches(steps, 6, order)
    assert [episode for batch in found for episode in batch] == order.tolist()
    for batch in found[:-1]:
        counts = [steps[episode] for episode in batch]
        assert sum(counts) >= 6 > sum(counts[:-1])
    assert found == minibatches(steps, 6, generator(0, "minibatches", 7).permutation(6))


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        # episode 0: steps of 2 and 1 tokens; episode 1, of zero advantage: one step of 3. M 3, ΣA 6, E 2.
        ("seq-mean-token-mean", [1 / 6, 1 / 6, 1 / 3, 1 / 9, 1 / 9, 1 / 9]),
        ("seq-mean-token-sum", [1 / 3] * 6),
        ("token-mean", [1 / 6] * 6),
        ("episode-mean", [1 / 8, 1 / 8, 1 / 4, 1 / 6, 1 / 6, 1 / 6]),
    ],
)
@pytest.mark.parametrize("rebuilt", [False, True])
def test_04_weights_count_the_whole_minibatch_before_masking(aggregation, weights, rebuilt: bool) -> None:
    episodes = [make_episode([[5, 6], [7]], rebuilt=rebuilt), make_episode([[5, 6, 7]], rebuilt=rebuilt)]
    rows = token_weights(build_rows(episodes, [1.0, 0.0], min_token_prob=0.9, mask_modes="all"), aggregation)
    found = np.concatenate([row.token_weight[row.loss_mask] for row in rows])
    np.testing.assert_allclose(found, weights, rtol=1e-6)
    assert not any(row.token_weight[~row.loss_mask].any() for row in rows)


def test_08_one_draw_covers_its_scope_and_is_repeatable() -> None:
    def modes(scope: Literal["iteration", "group", "episode"]) -> list[list[list[Mode]]]:
        config = AlgorithmConfig(p_memory=0.5, q_off_policy=0.5, mode_scope=scope)
        return [[[empo2.draw_mode(config, 1, i, g, m) for m in range(8)] for g in range(8)] for i in range(8)]

    by_iteration, by_group, by_episode = modes("iteration"), modes("group"), modes("episode")
    assert all(len({mode for group in iteration for mode in group}) == 1 for iteration in by_iteration)
    assert len({iteration[0][0] for iteration in by_iteration}) == 3
    assert all(len(set(group)) == 1 for iteration in by_group for group in iteration)
    assert any(len({group[0] for group in iteration}) == 3 for iteration in by_group)
    assert any(len(set(group)) == 3 for iteration in by_episode for group in iteration)
    assert by_episode == modes("episode")


def test_08_the_mode_is_kept_when_the_memory_is_empty() -> None:
    step = make_episode().steps[0]  # both prompts are equal
    episode = dataclasses.replace(make_episode(), mode=Mode.OFF_POLICY, steps=(step,))
    (row,), (acting,) = build_rows([episode], [1.0]), acting_rows([episode])
    assert row.mode == Mode.OFF_POLICY
    np.testing.assert_array_equal(row.token_ids, acting.token_ids)


def test_09_errors_are_no_reward_and_a_length_stop_keeps_its_return() -> None:
    stops = [(0.0, StopReason.DONE), (90.0, StopReason.ENV_ERROR), (2.0, StopReason.LENGTH),
             (4.0, StopReason.STEP_LIMIT), (70.0, StopReason.ENGINE_ERROR)]  # fmt: skip
    group = make_group(*(make_episode(rewards=[reward], stop_reason=stop) for reward, stop in stops))
    found = empo2.advantages([group], AlgorithmConfig(advantage_std_floor=0.0))  # mean 2, std 2
    assert per_episode(found) == pytest.approx([-1, 0, 1], rel=1e-5)
    metrics = group_metrics([group])
    assert (metrics["episode/invalid"], metrics["reward/mean"]) == pytest.approx((0.4, 2.0))


def test_09_fewer_than_two_valid_members_or_no_deviation_teach_nothing() -> None:
    single = make_group(make_episode(rewards=[5.0]), make_episode(stop_reason=StopReason.ENV_ERROR))
    tied = make_group(make_episode(rewards=[5.0]), make_episode(rewards=[5.0]))
    assert per_episode(empo2.advantages([single, tied], AlgorithmConfig(advantage_std_floor=0.0))) == [0.0, 0.0, 0.0]


def test_10_return_sums_both_rewards_undiscounted_and_the_floor_tames_novelty() -> None:
    episodes = [
        make_episode([[5], [6]], rewards=[1.0, 2.0], intrinsic=[1.0, 0.5]),
        make_episode([[5], [6]], rewards=[0.0, 3.0], intrinsic=[0.5, 0.0]),
    ]
    assert [e.extrinsic_return + e.intrinsic_return for e in episodes] == [4.5, 3.5]
    group, root = make_group(*episodes), 0.5**0.5  # mean 4, std √½
    plain, floored = AlgorithmConfig(advantage_std_floor=0.0), AlgorithmConfig()
    assert per_episode(empo2.advantages([group], plain)) == pytest.approx([root, -root], rel=1e-5)
    assert per_episode(empo2.advantages([group], floored)) == pytest.approx([0.1, -0.1])
    assert group_metrics([group])["group/phantom"] == 1.0


def test_10_a_row_that_does_not_fit_changes_no_return() -> None:
    long = make_episode([[5] * 20], rewards=[10.0])
    group = make_group(long, make_episode(rewards=[0.0]))
    advantages = relative_advantages(
        [group], AlgorithmConfig(advantage_std_floor=0.0), lambda episode: episode.extrinsic_return
    )
    packed = pack(build_rows(list(group.episodes), advantages), [16], 16)
    assert packed.dropped == [0]
    (kept,) = unpack([batch.advantages for batch in packed.batches], packed.placements)
    np.testing.assert_allclose(kept, [0, 0, -(0.5**0.5), -(0.5**0.5)], rtol=1e-5)


def test_12_mask_is_at_the_current_policy_without_gradient_and_keeps_kl_and_entropy() -> None:
    off = ready(1.0, [-2.0, -9.0], Mode.OFF_POLICY, np.exp(-5.0), reference_logprobs=[-1.0, -6.0])
    # the first token fell below δ since the denominator was taken, the second rose above it
    assert loss_of(off, [-6.0, -4.9]) == pytest.approx(-1.3)
    assert loss_of(off, [-6.0, -4.9], 2.0, entropy_coefficient=0.1) == pytest.approx(-1.3 - 0.1 * 4.0)
    kl = np.clip(np.exp(5.0) - 6, -10, 10) + np.exp(-1.1) + 1.1 - 1
    assert loss_of(off, [-6.0, -4.9], kl_coefficient=0.01) == pytest.approx(-1.3 + 0.01 * kl, rel=1e-5)

    batch = pack_one(ready(-1.0, [-6.0], Mode.OFF_POLICY, np.exp(-5.0)))
    slope = jax.grad(lambda x: policy_loss(x, jnp.zeros((1, 16)), batch, **CLIP)[0])(jnp.full((1, 16), -6.0))
    assert not slope.any()


def test_12_mask_sign_negative_spares_the_tokens_that_tips_unlocked() -> None:
    for advantage, sign, loss in [(1.0, "all", 0), (-1.0, "all", 0), (1.0, "negative", -1), (-1.0, "negative", 0)]:
        row = ready(advantage, [-6.0], Mode.OFF_POLICY, np.exp(-5.0))
        assert loss_of(row, [-6.0], mask_sign=sign) == pytest.approx(loss)


def test_12_only_off_policy_rows_are_masked_by_default() -> None:
    rows = build_rows([make_episode(mode=mode) for mode in Mode], [1.0] * 3, min_token_prob=0.0067)
    assert [row.mask_threshold for row in rows] == [0, 0, 0.0067]


def test_14_kl_and_entropy_share_the_token_weight() -> None:
    row = ready(0.0, [-1.0, -1.0], reference_logprobs=[-0.5, -30.0])
    row = dataclasses.replace(row, token_weight=f32([0, 0, 0.25, 0.5]))
    near, far = np.exp(0.5) - 1.5, 10.0  # d = −29 is clipped to −20: e^−20 + 19, clipped to 10
    assert loss_of(row, [-1.0, -1.0], kl_coefficient=0.1) == pytest.approx(0.1 * (0.25 * near + 0.5 * far), rel=1e-5)
    assert loss_of(row, [-1.0, -1.0], 2.0, entropy_coefficient=0.1) == pytest.approx(-0.1 * 0.75 * 2.0)


@pytest.mark.parametrize("normalization", ["std", "none"])
def test_16_gigpo_adds_to_each_step_what_it_is_worth_among_steps_of_the_same_state(
    normalization: Literal["std", "none"],
) -> None:
    config = AlgorithmConfig(advantage_std_floor=0.0, advantage_normalization=normalization)
    assert (config.step_weight, config.step_discount) == (1.0, 0.95)
    group = make_group(
        make_episode([[5, 5], [6]], rewards=[0.0, 40.0], anchors=["start", "left"]),  # G = 38, 40
        make_episode([[5, 5], [6]], rewards=[20.0, 0.0], anchors=["start", "right"]),  # G = 20, 0
        make_episode([[5, 5], [6]], rewards=[90.0, 90.0], anchors=["start", "left"], mode=Mode.OFF_POLICY),  # tips
    )
    by_episode = np.array([-40.0, -60.0, 100.0])  # returns 40, 20, 180: mean 80
    at_start = np.array([9.0, -9.0, 0.0])  # 38 and 20; what acted with tips is compared with nothing
    if normalization == "std":
        by_episode, at_start = by_episode / by_episode.std(ddof=1), at_start / 162**0.5
    found = gigpo.advantages([group], config)
    np.testing.assert_allclose([values[0] for values in found], by_episode + at_start, rtol=1e-5)
    np.testing.assert_allclose([values[1] for values in found], by_episode, rtol=1e-5)  # left and right are alone
    first, *_ = build_rows(list(group.episodes), found)
    assert first.advantages[first.loss_mask].tolist() == found[0][[0, 0, 1]].astype(np.float32).tolist()


def test_18_packing_changes_nothing_in_the_second_minibatch() -> None:
    rows = [ready(a, [-1.0, -2.0, -0.5]) for a in (1.0, -1.0, 2.0)]
    current = [f32([0, 0, -1.6, -1.7, -0.2])] * 3  # ratios e^−0.6, e^0.3, e^0.3
    alone = sum(loss_of(row, values[2:].tolist()) for row, values in zip(rows, current, strict=True))
    packed = pack(rows, [16], 16)
    values = np.zeros((1, 16), np.float32)
    for at, logprobs in zip(packed.placements, current, strict=True):
        values[at.sequence, at.start : at.start + at.length] = logprobs
    (batch,) = packed.batches
    together = policy_loss(jnp.asarray(values), jnp.zeros((1, 16)), batch, **CLIP)[0]
    root = np.exp(0.3)
    by_hand = (1 + 2) * -(np.exp(-0.6) + 2 * 1.3) + (0.8 + 2 * root)
    assert float(together) == pytest.approx(alone) == pytest.approx(by_hand, rel=1e-5)
