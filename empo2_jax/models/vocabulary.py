"""The two ends of the model that are as wide as the vocabulary, each device with its own part of it.

Embedding and head are split by token over the mesh axes of `RULES["vocab"]`. Rows of a batch are split over `fsdp` too,
so the devices of an `fsdp` group exchange token ids and hidden states of their rows, which are small, and never the
matrices: no device ever sees the part of another, or its gradient, or logits beyond [chunk, its part of V].
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, DTypeLike, Float, Float32, Int32

from empo2_jax.models.sharding import RULES, spec
from empo2_jax.ops.logprobs import Split, token_logprobs, token_loss
from empo2_jax.types import TrainBatch

Objective = Callable[
    [Float32[Array, "B T"], Float32[Array, "B T"], TrainBatch], tuple[Float32[Array, ""], dict[str, Array]]
]

_VOCAB, _BATCH = (tuple(RULES[axis] or ()) for axis in ("vocab", "batch"))
_SPLIT = Split(_VOCAB, "fsdp")
_DATA = tuple(axis for axis in _BATCH if axis not in _VOCAB)  # replicas of the head


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
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """Log-probs and entropies of the action tokens, nats; 0 elsewhere. Needs a mesh (`jax.set_mesh`).

    Args:
        hidden: Final hidden states.
        head: f32 master of the output matrix.
        token_ids: Tokens, each predicted from the hidden state before it.
        loss_mask: Action tokens; none is the first of its row. Only they go to the head.
        temperature: Divides the logits; above 0.
    """

    def local(hidden: Array, head: Array, token_ids: Array, loss_mask: Array) -> tuple[Array, Array]:
        index, count = _actions(loss_mask)
        states, targets = hidden.reshape(-1, hidden.shape[-1])[index - 1], token_ids.reshape(-1)[index]
        scored = token_logprobs(states, head, targets, temperature, count=count, split=_SPLIT)
        logprobs, entropy = (_spread(values, loss_mask.reshape(-1)).reshape(loss_mask.shape) for values in scored)
        return logprobs, entropy

    rows = spec("batch", "length")
    places = (spec("batch", "length", "hidden"), spec("vocab", "hidden"), rows, rows)
    run = jax.shard_map(local, in_specs=places, out_specs=(rows, rows), check_vma=False)
    return run(hidden, head, token_ids, loss_mask)


def action_loss(
    hidden: Float[Array, "B T D"],
    head: Float32[Array, "V D"],
    batch: TrainBatch,
    objective: Objective,
    *,
    temperature: float,
) -> tuple[Float32[Array, ""], dict[str, Array], Float[Array, "B T D"], Float32[Array, "V D"]]:
    """The objective of a batch with the gradients of `hidden` and `head`. Needs a mesh (`jax.set_mesh`).

    Args:
        hidden: Final hidden states.
        head: f32 master of the output matrix.
        batch: Rows; only their action tokens go to the head.
        objective: A sum over tokens: it is called on parts of the batch, of shape [1, n] and without branches.
        temperature: Divides the logits; above 0.

    Returns:
        The loss, the other sums, and the gradients of `hidden` and of `head`.
    """

    def loss(logprobs: Array, entropy: Array, part: TrainBatch) -> tuple[Array, dict[str, Array]]:
        return objective(logprobs[None], entropy[None], jax.tree.map(lambda values: values[None], part))

    def local(hidden: Array, head: Array, batch: TrainBatch) -> tuple[Any, ...]:
        mask = jnp.asarray(batch.loss_mask)
        index, count = _actions(mask)
        part = jax.tree.map(lambda values: values.reshape(-1)[index], batch)
        part = part._replace(loss_mask=index > 0)
        states = hidden.reshape(-1, hidden.shape[-1])[index - 1]
        value, sums, to_states, to_head = token_loss(
            states, head, part.token_ids, part, loss, temperature, count=count, split=_SPLIT
        )
        predicts = jnp.roll(mask.reshape(-1), -1)  # no first token is an action
        value, sums = jax.lax.psum((value, sums), _BATCH)
        return value, sums, _spread(to_states, predicts).reshape(hidden.shape), jax.lax.psum(to_head, _DATA)

    states, table, whole = spec("batch", "length", "hidden"), spec("vocab", "hidden"), PartitionSpec()
    places, results = (states, table, spec("batch", "length")), (whole, whole, states, table)
    run = jax.shard_map(local, in_specs=places, out_specs=results, check_vma=False)
    return run(hidden, head, jax.tree.map(jnp.asarray, batch._replace(branches=None)))


def _actions(loss_mask: Bool[Array, "b T"]) -> tuple[Int32[Array, " n"], Int32[Array, ""]]:
    """Places of this device's action tokens, then zeros; the largest number of them on any device."""
    (index,) = jnp.nonzero(loss_mask.reshape(-1), size=loss_mask.size, fill_value=0)  # 0: a first token, no action
    return index, jax.lax.pmax(loss_mask.sum(dtype=jnp.int32), _BATCH)


def _spread(values: Float[Array, "n ..."], chosen: Bool[Array, " n"]) -> Float[Array, "n ..."]:
    """Values of the action tokens, in their order, at the chosen places; 0 elsewhere. A gather, not a scatter."""
    found = values[jnp.maximum(jnp.cumsum(chosen, dtype=jnp.int32) - 1, 0)]
    return jnp.where(chosen.reshape(-1, *[1] * (values.ndim - 1)), found, 0.0)
