"""Log-probabilities and entropies of tokens from hidden states, chunked so that [N, V] never exists.

Temperature enters as in sampling: everything is log-softmax(logits / temperature) over the full vocabulary (paper
section 4.2 needs the same for masks and ratios). Top-p and top-k have no place here.
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
) -> tuple[Float32[Array, " N"], Float32[Array, " N"]]:
    """Log-probability of each target and entropy of its distribution, nats, both differentiable.

    Args:
        hidden: Final hidden state that predicts each target.
        head: Output matrix. Pass the f32 master: it is cast to the type of `hidden` inside a chunk, so that its
            gradient is summed over chunks in f32.
        targets: Token ids; any valid id where the result is not used.
        temperature: Divides the logits; above 0.
        chunk: Tokens whose logits exist at a time, f32[chunk, V], in the forward and in the backward pass.
    """
    count, width = hidden.shape
    chunk = min(chunk, count)
    pad = -count % chunk
    parts = (count + pad) // chunk
    # Chunk i takes every parts-th token: a batch axis sharded over devices stays sharded inside each chunk.
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(chunk, parts, width).swapaxes(0, 1)
    targets = jnp.pad(targets, (0, pad)).reshape(chunk, parts).swapaxes(0, 1)

    def one_chunk(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        states, ids = inputs
        logits = jnp.einsum("nd,vd->nv", states, head.astype(states.dtype), preferred_element_type=jnp.float32)
        logprobs = jax.nn.log_softmax(logits / temperature)
        chosen = jnp.take_along_axis(logprobs, ids[:, None], axis=1)[:, 0]
        return chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=1)

    # A single chunk has nothing to gain from being computed twice.
    chosen, entropy = jax.lax.map(jax.checkpoint(one_chunk) if parts > 1 else one_chunk, (hidden, targets))
    return chosen.swapaxes(0, 1).reshape(-1)[:count], entropy.swapaxes(0, 1).reshape(-1)[:count]
