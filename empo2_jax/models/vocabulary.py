"""The two ends of the model that are as wide as the vocabulary, each device with its own part of it.

Embedding and head are split by token over the mesh axes of `RULES["vocab"]`. Rows of a batch are split over `fsdp` too,
so the devices of an `fsdp` group exchange token ids and hidden states of their rows, which are small, and never the
matrices: no device ever sees the part of another, or its gradient, or logits beyond [chunk, its part of V].
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Float32, Int32

from empo2_jax.models.sharding import RULES, spec
from empo2_jax.ops.logprobs import token_logprobs

_VOCAB = RULES["vocab"] or ()


def embed(table: Float[Array, "V D"], token_ids: Int32[Array, "B T"], dtype: DTypeLike) -> Float[Array, "B T D"]:
    """Rows of `table` in `dtype`. Without a mesh (`jax.set_mesh`) a plain look-up."""

    def local(table: Array, token_ids: Array) -> Array:
        own = jax.lax.all_gather(token_ids, "fsdp", tiled=True) - jax.lax.axis_index(_VOCAB) * table.shape[0]
        here = (own >= 0) & (own < table.shape[0])
        found = jnp.where(here[..., None], table[jnp.where(here, own, 0)], 0).astype(dtype)
        return jax.lax.psum_scatter(jax.lax.psum(found, "tensor"), "fsdp", tiled=True)  # one term is not 0

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return table[token_ids].astype(dtype)
    places = (spec("vocab", "hidden"), spec("batch", "length"))
    return jax.shard_map(local, in_specs=places, out_specs=spec("batch", "length", "hidden"))(table, token_ids)


def action_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float32[Array, "V D"],
    token_ids: Int32[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    *,
    temperature: float,
    capacity: int,
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """Log-probs and entropies of the action tokens, nats; 0 elsewhere. Needs a mesh (`jax.set_mesh`).

    Args:
        hidden: Final hidden states.
        head: f32 master of the output matrix.
        token_ids: Tokens, each predicted from the hidden state before it.
        loss_mask: Action tokens; none is the first of its row. Only they go to the head.
        temperature: Divides the logits; above 0.
        capacity: Room for the action tokens of each shard of the batch, static; at least their number.
    """

    def local(hidden: Array, head: Array, token_ids: Array, loss_mask: Array) -> tuple[Array, Array]:
        # The fill value 0 is never an action token, since nothing predicts a first token.
        (index,) = jnp.nonzero(loss_mask.reshape(-1), size=capacity, fill_value=0)
        mine = hidden.reshape(-1, hidden.shape[-1])[index - 1], token_ids.reshape(-1)[index]
        states, targets = (jax.lax.all_gather(part, "fsdp", tiled=True) for part in mine)
        scored = token_logprobs(states, head, targets, temperature, axes=_VOCAB)

        def spread(values: Array) -> Array:
            own = jax.lax.dynamic_slice_in_dim(values, jax.lax.axis_index("fsdp") * capacity, capacity)
            empty = jnp.zeros(token_ids.size, jnp.float32)
            return empty.at[index].add(jnp.where(index > 0, own, 0.0)).reshape(token_ids.shape)

        return spread(scored[0]), spread(scored[1])

    rows = spec("batch", "length")
    places = (spec("batch", "length", "hidden"), spec("vocab", "hidden"), rows, rows)
    return jax.shard_map(local, in_specs=places, out_specs=(rows, rows))(hidden, head, token_ids, loss_mask)
