"""Implicit Q-learning (arXiv 2110.06169): values of recorded actions without ever asking for an unrecorded one.

V is the upper expectile of Q over the actions of the data (equation 5), Q the reward plus the discounted V of the state
that followed (equation 6). Nothing here knows networks or texts; the third part of the method, weighting a policy by
exp(β · (Q − V)), is not used: Retrospex rescores a given policy's actions instead.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32


def expectile_loss(difference: Float32[Array, " N"], expectile: float) -> Float32[Array, " N"]:
    """|τ − 1(u < 0)| · u², least in the mean where u's τ-expectile is 0 (equation 4; τ = 1/2: half the square)."""
    return jnp.where(difference < 0, 1 - expectile, expectile) * jnp.square(difference)


def td_target(
    rewards: Float32[Array, " N"], ended: Bool[Array, " N"], following: Float32[Array, " N"], discount: float
) -> Float32[Array, " N"]:
    """The reward plus γ · V(s'), and the reward alone where the episode ended."""
    return rewards + discount * jnp.where(ended, 0.0, following)
