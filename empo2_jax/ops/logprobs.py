"""Log-probabilities and entropies of tokens from hidden states, chunked so that [N, V] never exists.

Temperature enters as in sampling: everything is log-softmax(logits / temperature) over the full vocabulary (paper
section 4.2 needs the same for masks and ratios). Top-p and top-k have no place here. Inside `jax.shard_map` the head
may be one part of the vocabulary: each chunk then costs a maximum and three sums over the mesh axes, [chunk] each.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


def token_logprobs(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    targets: Int32[Array, " N"],
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 512,
    axes: str | tuple[str, ...] = (),
) -> tuple[Float32[Array, " N"], Float32[Array, " N"]]:
    """Log-probability of each target and entropy of its distribution, nats, both differentiable.

    Args:
        hidden: Final hidden state that predicts each target.
        head: Output matrix. Pass the f32 master: it is cast to the type of `hidden` inside a chunk, so that its
            gradient is summed over chunks in f32.
        targets: Token ids; any valid id where the result is not used.
        temperature: Divides the logits; above 0.
        chunk: Tokens whose logits exist at a time, f32[chunk, V], in the forward and in the backward pass.
        axes: Mesh axes over which the vocabulary is split in equal parts, `head` being this device's; none = whole.
            `hidden` and `targets` are the same on all devices of these axes.
    """
    count, width = hidden.shape
    chunk = min(chunk, count)
    pad = -count % chunk
    parts = (count + pad) // chunk
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(parts, chunk, width)
    targets = jnp.pad(targets, (0, pad)).reshape(parts, chunk)
    first = jax.lax.axis_index(axes) * head.shape[0]  # token id of the first row of `head`

    def one_chunk(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        states, ids = inputs
        logits = jnp.einsum("nd,vd->nv", states, head.astype(states.dtype), preferred_element_type=jnp.float32)
        logits = logits / temperature
        top = jax.lax.pmax(jax.lax.stop_gradient(logits.max(axis=1)), axes)
        logits = logits - top[:, None]
        weights, own = jnp.exp(logits), ids - first
        here = (own >= 0) & (own < head.shape[0])
        chosen = jnp.take_along_axis(logits, jnp.where(here, own, 0)[:, None], axis=1)[:, 0]
        sums = weights.sum(axis=1), (weights * logits).sum(axis=1), jnp.where(here, chosen, 0.0)
        total, energy, chosen = jax.lax.psum(sums, axes)
        log_total = jnp.log(total)
        return chosen - log_total, log_total - energy / total

    # A single chunk has nothing to gain from being computed twice.
    chosen, entropy = jax.lax.map(jax.checkpoint(one_chunk) if parts > 1 else one_chunk, (hidden, targets))
    return chosen.reshape(-1)[:count], entropy.reshape(-1)[:count]
