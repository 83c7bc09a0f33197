"""Ratios of probabilities: policy against its past self (JAX), and trainer against engine (numpy, host).

The first is differentiated and clipped by the loss; the second is a constant that corrects numerics and staleness of
the engine. Neither ever compares a prompt with tips to one without, except where the denominator is `behavior`.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

LOG_RATIO_LIMIT = 20.0  # nats; keeps exp finite in f32


def importance_ratio(
    logprobs: Float[Array, "*shape"], denominator_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Per token exp(clip(logprobs − denominator_logprobs, ±20)); both in nats."""
    return jnp.exp(jnp.clip(logprobs - denominator_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def truncated_rollout_weight(
    acting_logprobs: Float32[np.ndarray, " T"], behavior_logprobs: Float32[np.ndarray, " T"], cap: float = 2.0
) -> Float32[np.ndarray, " T"]:
    """min(cap, exp(log π_θ0(a | P_act) − log μ_engine(a | P_act))), per token.

    Args:
        acting_logprobs: The trainer's, before the first update, under the prompt the policy acted on; nats.
        behavior_logprobs: The engine's, under the same prompt; nats.
        cap: Largest weight.
    """
    gap = np.clip(acting_logprobs - behavior_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return np.minimum(np.float32(cap), np.exp(gap))
