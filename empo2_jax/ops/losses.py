"""The loss of all three modes (paper equations 1 and 2): one weighted sum over tokens, with no branch on the mode.

What differs between the modes, and between the ways to average, is in the numbers of the batch: the prompt before the
action, `denominator_logprobs`, `mask_threshold` and `token_weight`. Because the weights carry batch-global
denominators, losses and metric sums of micro-batches add up to those of the mini-batch.
"""

from collections.abc import Mapping
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from empo2_jax.ops.ratios import LOG_RATIO_LIMIT, importance_ratio
from empo2_jax.types import Mode, TrainBatch

_K3_LIMIT = 10.0  # nats per token


def clipped_surrogate(
    ratio: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> Float[Array, "*shape"]:
    """PPO's loss per token: max(−A·r, −A·clip(r, 1 − ε_low, 1 + ε_high)), at most −A·c where A < 0."""
    loss = jnp.maximum(-advantages * ratio, -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    return jnp.where(advantages < 0, jnp.minimum(loss, -advantages * dual_clip), loss)


def k3_divergence(
    logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Low-variance estimate of KL(π ‖ reference) per sampled token, nats: clip(e^d − d − 1, ±10), d = ref − logp."""
    gap = jnp.clip(reference_logprobs - logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.clip(jnp.exp(gap) - gap - 1, -_K3_LIMIT, _K3_LIMIT)


def likely_tokens(
    logprobs: Float[Array, "*shape"],
    mask_threshold: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask_sign: Literal["all", "negative"],
) -> Bool[Array, "*shape"]:
    """Tokens that keep their policy loss: π ≥ δ at the current weights, or out of the mask's reach. No gradient."""
    likely = jnp.exp(jax.lax.stop_gradient(logprobs)) >= mask_threshold
    return likely | (advantages >= 0) if mask_sign == "negative" else likely


def policy_loss(
    logprobs: Float32[Array, "B T"],
    entropy: Float32[Array, "B T"],
    batch: TrainBatch,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
    mask_sign: Literal["all", "negative"] = "all",
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """Σ weight · (surrogate · rollout weight · mask + β·k3 − c_H·H) over the action tokens.

    Args:
        logprobs: Differentiated, nats; belongs to the token at the same place; ignored off the loss mask.
        entropy: Of the distribution the token was predicted from, nats.
        batch: Packed rows with their ledgers and weights.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c, above 1.
        kl_coefficient: β; at 0 the batch needs no `reference_logprobs`, and the KL sum is 0.
        entropy_coefficient: c_H.
        mask_sign: Tokens the probability mask may hide: all, or those with a negative advantage.

    Returns:
        The loss, and the sums that `finalize_metrics` turns into metrics; both add up over micro-batches.
    """
    chex.assert_equal_shape((logprobs, entropy, *jax.tree.leaves(batch._replace(branches=None))))
    mask, advantages, modes = map(jnp.asarray, (batch.loss_mask, batch.advantages, batch.mode))
    weight = jnp.where(mask, batch.token_weight, 0.0)
    logprobs, entropy = jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropy, 0.0)
    denominator = jnp.where(mask, batch.denominator_logprobs, 0.0)
    ratio = importance_ratio(logprobs, denominator)
    kept = likely_tokens(logprobs, jnp.asarray(batch.mask_threshold), advantages, mask_sign)
    surrogate = clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    policy = jnp.sum(weight * surrogate * batch.rollout_weight * kept)
    kl = jnp.zeros_like(logprobs)
    if kl_coefficient:
        kl = k3_divergence(logprobs, jnp.asarray(batch.reference_logprobs))
    loss = policy + jnp.sum(weight * (kl_coefficient * kl - entropy_coefficient * entropy))

    masked = ~kept | (weight == 0)  # a step that was dropped whole has weight 0
    per_token = {
        "tokens": jnp.ones_like(ratio),
        "ratio": ratio,
        "ratio_squared": ratio**2,
        "clipped": advantages * (ratio - jnp.clip(ratio, 1 - clip_low, 1 + clip_high)) > 0,
        "masked": masked,
        "masked_negative": masked & (advantages < 0),
        "negative": advantages < 0,
        "entropy": entropy,
        "kl": kl,
        "logprob_gap": jnp.abs(logprobs - denominator),
    }
    in_mode = mask[None] & (modes[None] == jnp.arange(len(Mode))[:, None, None])
    sums = {name: jnp.sum(jnp.where(in_mode, value[None], 0.0), axis=(1, 2)) for name, value in per_token.items()}
    return loss, jax.lax.stop_gradient({"pg_loss": policy, **sums})


def finalize_metrics(sums: Mapping[str, Array | np.ndarray], updates: int = 1) -> dict[str, float]:
    """Means and shares from sums over any number of micro-batches.

    Args:
        sums: Sums of the dictionaries of `policy_loss`.
        updates: Mini-batches in the sums; the policy loss is a mean over them.

    Returns:
        `actor/*` over all action tokens, and `empo2/{on,on_memory,off}/*` for the modes that have tokens: mean ratio,
        `clipfrac`, `masked` (share of tokens), `masked_negative` (share of those with A < 0), `ess` (effective sample
        size over tokens, 0–1), `logprob_gap` (mean absolute change since the denominator, nats), `entropy` (nats).
    """
    values = {name: np.asarray(value, np.float64) for name, value in sums.items()}
    tokens = max(values["tokens"].sum(), 1.0)
    metrics = {
        "actor/pg_loss": float(values["pg_loss"]) / updates,
        "actor/entropy": float(values["entropy"].sum() / tokens),
        "actor/pg_clipfrac": float(values["clipped"].sum() / tokens),
        "actor/kl": float(values["kl"].sum() / tokens),
    }
    for member in Mode:
        mode = {key: float(value[member]) for key, value in values.items() if key != "pg_loss"}
        if mode["tokens"] == 0:
            continue
        prefix, count = f"empo2/{member.label}", mode["tokens"]
        metrics[f"{prefix}/ratio"] = mode["ratio"] / count
        metrics[f"{prefix}/clipfrac"] = mode["clipped"] / count
        metrics[f"{prefix}/masked"] = mode["masked"] / count
        metrics[f"{prefix}/masked_negative"] = mode["masked_negative"] / max(mode["negative"], 1.0)
        metrics[f"{prefix}/ess"] = mode["ratio"] ** 2 / (count * mode["ratio_squared"])
        metrics[f"{prefix}/logprob_gap"] = mode["logprob_gap"] / count
        metrics[f"{prefix}/entropy"] = mode["entropy"] / count
    return metrics
