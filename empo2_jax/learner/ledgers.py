"""The log-prob ledgers of an iteration, filled once before the first update and frozen over it.

With θ0 the weights that collected the episodes: the denominator of the importance ratio is log π_θ0(a | P_loss), or
log π_θ0(a | P_act) for `OFF_POLICY` rows under the `behavior` denominator. The rollout weight corrects the engine's
numerics under P_act and never tips against no tips (paper section 4.2 and Table 3).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from jaxtyping import Float32

from empo2_jax.data.packing import pack, unpack
from empo2_jax.data.rows import acting_rows, transfer
from empo2_jax.learner.step import Learner
from empo2_jax.ops.ratios import truncated_rollout_weight
from empo2_jax.types import Episode, Mode, Row

Values = list[Float32[np.ndarray, " _"]]  # one array per row, T values each
Score = Callable[[Sequence[Row]], Values]


def scorer(learner: Learner, params: object, buckets: Sequence[int], micro_batch_tokens: int) -> Score:
    """A function from rows to the log-probs of their action tokens under `params`, nats."""

    def score(rows: Sequence[Row]) -> Values:
        packed = pack(rows, buckets, micro_batch_tokens, learner.row_multiple)
        return unpack([learner.logprobs(params, batch)[0] for batch in packed.batches], packed.placements)

    return score


def fill(
    rows: Sequence[Row],
    episodes: Sequence[Episode],
    score: Score,
    *,
    denominator: Literal["student", "behavior"],
    correction_cap: float | None,
    reference: Score | None = None,
) -> tuple[list[Row], dict[str, float]]:
    """Rows with their ledgers, and the metrics of the gap between engine and trainer.

    Args:
        rows: Rows under P_loss, none longer than the largest bucket.
        episodes: The valid episodes that the rows index.
        score: Log-probs under θ0.
        denominator: Of `OFF_POLICY` rows.
        correction_cap: Cap of the rollout weight; None = no correction (the weight stays 1).
        reference: Log-probs under the policy at the start of RL, when a KL term needs them.
    """
    own = score(rows)
    acting = own
    off_policy = any(row.mode == Mode.OFF_POLICY for row in rows)
    if off_policy and (denominator == "behavior" or correction_cap is not None):
        tipped = acting_rows(episodes)
        acting = transfer(tipped, score(tipped), rows, own)
    references: Sequence[Float32[np.ndarray, " _"] | None] = reference(rows) if reference else [None] * len(rows)
    filled = [
        replace(
            row,
            denominator_logprobs=acts if row.mode == Mode.OFF_POLICY and denominator == "behavior" else mine,
            reference_logprobs=base,
            rollout_weight=None
            if correction_cap is None
            else truncated_rollout_weight(acts, row.behavior_logprobs, correction_cap),
        )
        for row, mine, acts, base in zip(rows, own, acting, references, strict=True)
    ]
    return filled, _gaps(rows, own, acting)


def _gaps(rows: Sequence[Row], own: Values, acting: Values) -> dict[str, float]:
    """Engine against trainer where both have seen one prompt; tips against no tips."""
    known = zip(rows, own, acting, strict=True)
    same = [_gap(row, acts) for row, mine, acts in known if row.mode != Mode.OFF_POLICY or acts is not mine]
    tips = [_gap(row, mine) for row, mine in zip(rows, own, strict=True) if row.mode == Mode.OFF_POLICY]
    metrics = {}
    if same and (gap := np.concatenate(same)).size:
        metrics["mismatch/logprob_abs_diff"] = float(np.abs(gap).mean())
        metrics["mismatch/logprob_abs_diff_max"] = float(np.abs(gap).max())
        metrics["mismatch/kl"] = float(gap.mean())
    if tips and (gap := np.concatenate(tips)).size:
        metrics["empo2/off/kl_tips_vs_bare"] = float(gap.mean())
    return metrics


def _gap(row: Row, logprobs: Float32[np.ndarray, " T"]) -> Float32[np.ndarray, " A"]:
    return (row.behavior_logprobs - logprobs)[row.loss_mask]
