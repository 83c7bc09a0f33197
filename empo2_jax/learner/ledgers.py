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
from empo2_jax.ops.ratios import LOG_RATIO_LIMIT, truncated_rollout_weight
from empo2_jax.types import Episode, Mode, Row

Values = list[Float32[np.ndarray, " _"]]  # one array per row, T values each
Score = Callable[[Sequence[Row]], Values]


def scorer(learner: Learner, params: object, buckets: Sequence[int], micro_batch_tokens: int) -> Score:
    """A function from rows to the log-probs of their action tokens, in branches too, under `params`, nats."""

    def score(rows: Sequence[Row]) -> Values:
        rows = [replace(row, loss_mask=row.step_index >= 0) for row in rows]
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
    branch_room: int | None = None,
    policy_version: int | None = None,
) -> tuple[list[Row], dict[str, float]]:
    """Rows with their ledgers, and the metrics of the gap between engine and trainer.

    Rows that older weights sampled have the trainer's own log-probs as denominators too, so that the clip bounds this
    update alone, while the rollout weight carries what the policy has moved since they were sampled.

    Args:
        rows: Rows under P_loss that fit into batches.
        episodes: The valid episodes that the rows index.
        score: Log-probs under θ0, of all action tokens of a row.
        denominator: Of `OFF_POLICY` rows.
        correction_cap: Cap of the rollout weight; None = no correction (the weight stays 1).
        reference: Log-probs under the policy at the start of RL, when a KL term needs them.
        branch_room: That of the rows, see `build_rows`; with it one forward pass has both prompts of an episode.
        policy_version: That of the weights behind `score`; None: those that collected every episode.
    """
    tipped: list[Row] = []
    if denominator == "behavior" or correction_cap is not None:
        tipped = acting_rows(episodes, branch_room)
    own, acting, bare = _conditioned(rows, tipped, score, joint=branch_room is not None)
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
    stale = {index for index, episode in enumerate(episodes) if policy_version not in (None, episode.policy_version)}
    metrics = _gaps(rows, own, acting, bare, stale)
    return filled, metrics | _drift(filled, own, acting, stale, correction_cap)


def _conditioned(
    rows: Sequence[Row], tipped: Sequence[Row], score: Score, joint: bool
) -> tuple[Values, Values, Values]:
    """Log-probs of the loss tokens under P_loss, P_act and the trunk of a branch; P_loss where the last are not known.

    Where `tipped` has both prompts of an episode (`joint`), its row in `rows` is not scored.
    """
    known = {row.episode for row in tipped} if joint else set()
    scored = iter(score([row for row in rows if row.episode not in known]))
    blank = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    full = [zero if row.episode in known else next(scored) for row, zero in zip(rows, blank, strict=True)]
    own = [np.where(row.loss_mask, values, zero) for row, values, zero in zip(rows, full, blank, strict=True)]
    bare = transfer(rows, full, rows, own, trunk=True)
    if not tipped:
        return own, own, bare
    seen = score(tipped)
    own = transfer(tipped, seen, rows, own, trunk=True) if joint else own
    return own, transfer(tipped, seen, rows, own), bare


def _acting_known(row: Row, mine: np.ndarray, acts: np.ndarray) -> bool:
    """Whether `acts` is under the prompt that the row acted with; where nobody asked for that it is `mine`."""
    return row.mode != Mode.OFF_POLICY or acts is not mine


def _drift(rows: Sequence[Row], own: Values, acting: Values, stale: set[int], cap: float | None) -> dict[str, float]:
    """How far the policy has moved from the weights that sampled the `stale` episodes, under the prompts they saw."""
    pairs = [pair for pair in zip(rows, own, acting, strict=True) if pair[0].episode in stale and _acting_known(*pair)]
    moved = [(row, acts) for row, _, acts in pairs]
    if not moved:
        return {}
    gaps = np.concatenate([(row.behavior_logprobs - acts)[row.loss_mask] for row, acts in moved])
    metrics = {"staleness/kl": float(gaps.mean()), "staleness/logprob_abs_diff": float(np.abs(gaps).mean())}
    if cap is not None:
        weights = np.concatenate(
            [row.rollout_weight[row.loss_mask] for row, _ in moved if row.rollout_weight is not None]
        )
        metrics["staleness/capped"] = float((weights >= cap).mean())
    return metrics


def _gaps(rows: Sequence[Row], own: Values, acting: Values, bare: Values, stale: set[int]) -> dict[str, float]:
    """Engine against trainer where both have seen one prompt under the same weights; tips against no tips.

    The latter under θ0, over tokens that were sampled with tips: `kl_tips_vs_bare` is the mean of log π(with) −
    log π(without), an estimate of their KL in nats; `bare_ratio` the mean of w = π(without) / π(with), 1 on average;
    `bare_ess` the effective sample size of these weights over the number of tokens, 0–1. What a stale row was sampled
    with differs by the weights too, so there only the trainer's own two log-probs count.
    """
    same, off, on_memory = [], [], []
    for row, mine, acts, trunk in zip(rows, own, acting, bare, strict=True):
        if row.episode not in stale and _acting_known(row, mine, acts):
            same.append((row.behavior_logprobs - acts)[row.loss_mask])
        if row.mode == Mode.OFF_POLICY and (row.episode not in stale or _acting_known(row, mine, acts)):
            off.append(((row.behavior_logprobs if acts is mine else acts) - mine)[row.loss_mask])
        if row.branches:
            on_memory.append((mine - trunk)[row.loss_mask])
    metrics = {}
    if same and (gap := np.concatenate(same)).size:
        metrics["mismatch/logprob_abs_diff"] = float(np.abs(gap).mean())
        metrics["mismatch/logprob_abs_diff_max"] = float(np.abs(gap).max())
        metrics["mismatch/kl"] = float(gap.mean())
    for mode, gaps in ((Mode.OFF_POLICY, off), (Mode.ON_POLICY_WITH_MEMORY, on_memory)):
        if gaps and (gap := np.concatenate(gaps)).size:
            bare_over_tips = np.exp(np.clip(-gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
            metrics[f"empo2/{mode.label}/kl_tips_vs_bare"] = float(gap.mean())
            metrics[f"empo2/{mode.label}/bare_ratio"] = float(bare_over_tips.mean())
            metrics[f"empo2/{mode.label}/bare_ess"] = float(
                bare_over_tips.mean() ** 2 / np.square(bare_over_tips).mean()
            )
    return metrics
