"""Grouped-query attention shared by the trainer's forward pass and the engine's cached one.

Both entry points build a visibility mask and call one core, so that the log-probabilities of a token do not depend on
which side computed them. Keys and values are never repeated over their query groups, scores and softmax are f32, and a
query that sees nothing (padding) yields finite values. Long rows are processed in chunks of queries under
`jax.checkpoint`, so that no [T, T] array exists in the forward or the backward pass.

This is portable XLA code, not a fused kernel.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

QUERY_CHUNK = 512  # queries per chunk; rows up to this length take one
_HIDDEN = -1e30  # score of an invisible key; finite, so that fully masked rows do not produce NaN


def segment_attention(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    positions: Int32[Array, "B T"],
    segment_ids: Int32[Array, "B T"],
    window: int | None = None,
    chunk: int = QUERY_CHUNK,
) -> Float[Array, "B T H d"]:
    """Causal attention inside each segment of packed rows.

    Args:
        q: Queries, already rotated; `H` is a multiple of `K`.
        k: Keys, already rotated.
        v: Values.
        positions: Position inside the segment, ascending from 0.
        segment_ids: Segment of each token; 0 is padding, whose outputs are finite and meaningless.
        window: A query sees its own and the `window - 1` tokens before it; `None` sees all.
        chunk: Queries per chunk.
    """
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)

    def attend(q: Array, query_positions: Array, query_segments: Array) -> Array:
        visible = query_segments[:, :, None] == segment_ids[:, None, :]
        visible &= _causal(query_positions, positions[:, None, :], window)
        return _attend(q, keys, values, visible)

    rows, length = positions.shape
    if length <= chunk:
        return attend(q, positions, segment_ids)
    chunks = -(-length // chunk)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, chunks * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return padded.reshape(rows, chunks, chunk, *x.shape[2:]).swapaxes(0, 1)

    pieces = (split(q), split(positions), split(segment_ids))
    out = jax.lax.map(jax.checkpoint(lambda piece: attend(*piece)), pieces)
    return out.swapaxes(0, 1).reshape(rows, chunks * chunk, *q.shape[2:])[:, :length]


def cached_attention(
    q: Float[Array, "S Tb H d"],
    keys: Float[Array, "S K W d"],
    values: Float[Array, "S K W d"],
    positions: Int32[Array, "S Tb"],
    window: int | None = None,
) -> Float[Array, "S Tb H d"]:
    """Attention of new tokens over a cache in which column `c` holds position `c`.

    Args:
        q: Queries of the new tokens, already rotated; their own keys are already in the cache.
        keys: Cached keys, `W` columns of each slot.
        values: Cached values.
        positions: Position of each query: it sees the columns up to and including its own.
        window: As in `segment_attention`.
    """
    columns = jnp.arange(keys.shape[2], dtype=jnp.int32)[None, None]
    return _attend(q, keys, values, _causal(positions, columns, window))


def _causal(queries: Int32[Array, "B Tq"], keys: Int32[Array, "#B 1 Tk"], window: int | None) -> Bool[Array, "B Tq Tk"]:
    """Which key position each query position may see."""
    distance = queries[:, :, None] - keys
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _attend(
    q: Float[Array, "B Tq H d"],
    keys: Float[Array, "B K Tk d"],
    values: Float[Array, "B K Tk d"],
    visible: Bool[Array, "B Tq Tk"],
) -> Float[Array, "B Tq H d"]:
    """Scaled dot-product attention; the groups of a key head are extra rows of its query matrix."""
    rows, length, heads, size = q.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    grouped = q.reshape(rows, length, kv_heads, groups, size).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(rows, kv_heads, length * groups, size)
    scores = jnp.einsum("bkqd,bksd->bkqs", grouped, keys, preferred_element_type=jnp.float32) * size**-0.5
    scores = scores.reshape(rows, kv_heads, length, groups, -1)
    weights = jax.nn.softmax(jnp.where(visible[:, None, :, None, :], scores, _HIDDEN), axis=-1)
    weights = weights.reshape(rows, kv_heads, length * groups, -1).astype(values.dtype)
    out = jnp.einsum("bkqs,bksd->bkqd", weights, values)
    return out.reshape(rows, kv_heads, length, groups, size).transpose(0, 2, 1, 3, 4).reshape(q.shape)
