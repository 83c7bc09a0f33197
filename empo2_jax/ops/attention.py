"""Grouped-query attention shared by the trainer's forward pass and the engine's cached one.

Both entry points build a visibility mask and call one core, so that the log-probabilities of a token do not depend on
which side computed them. Keys and values are never repeated over their query groups, scores and softmax are f32, and a
query that sees nothing (padding) yields finite values. Rows are processed in chunks of queries under
`jax.checkpoint`, so that no [T, T] array exists in the forward or the backward pass, and keys behind the queries, which
causal attention never sees, are mostly left out.

Attention over parts of the keys can be merged, see `ops/branch_attention.py`. This is portable XLA code, not a fused
kernel.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

QUERY_CHUNK = 128  # queries whose scores exist at a time
_SPANS = 8  # at most so many pieces of a row, each over the keys up to its end
HIDDEN = -1e30  # score of an invisible key; finite, so that fully masked rows do not produce NaN


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
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 3, 1)
    rows, length = positions.shape

    def attend_span(start: int, stop: int) -> Array:
        size = min(chunk, stop - start)
        pad = -(stop - start) % size

        def split(x: Array) -> Array:
            padded = jnp.pad(x[:, start:stop], [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
            return padded.reshape(rows, -1, size, *x.shape[2:]).swapaxes(0, 1)

        @jax.checkpoint
        def attend(piece: tuple[Array, Array, Array]) -> Array:
            q, query_positions, query_segments = piece
            visible = query_segments[:, :, None] == segment_ids[:, None, :stop]
            visible &= causal(query_positions, positions[:, None, :stop], window)
            return finish_softmax(partial_softmax(q, keys[..., :stop], values[..., :stop], visible), values.dtype)

        out = jax.lax.map(attend, (split(q), split(positions), split(segment_ids)))
        return out.swapaxes(0, 1).reshape(rows, -1, *q.shape[2:])[:, : stop - start]

    span = chunk * -(-length // (chunk * _SPANS))
    spans = [attend_span(start, min(start + span, length)) for start in range(0, length, span)]
    return jnp.concatenate(spans, axis=1)


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
    visible = causal(positions, columns, window)
    return finish_softmax(partial_softmax(q, keys, values, visible, lie="sd"), values.dtype)


def causal(queries: Int32[Array, "B Tq"], keys: Int32[Array, "#B 1 Tk"], window: int | None) -> Bool[Array, "B Tq Tk"]:
    """Which key position each query position may see."""
    distance = queries[:, :, None] - keys
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


class PartialSoftmax(NamedTuple):
    """Attention over a part of the keys: f32, not divided by the sum of its weights yet."""

    weighted: Float[Array, "B K Tq G d"]
    peak: Float[Array, "B K Tq G 1"]  # score that the weights are relative to; carries no gradient
    total: Float[Array, "B K Tq G 1"]


def partial_softmax(
    q: Float[Array, "B Tq H d"],
    keys: Float[Array, "B K _ _"],
    values: Float[Array, "B K _ _"],
    visible: Bool[Array, "B Tq Tk"],
    lie: Literal["ds", "sd"] = "ds",
) -> PartialSoftmax:
    """Scaled dot-product attention; the groups of a key head are extra rows of its query matrix.

    Args:
        q: Queries, already rotated.
        keys: [d, Tk] or [Tk, d] for each head, as `lie` says.
        values: Likewise.
        visible: Which query sees which key.
        lie: Keys that want a gradient lie "ds" because it does: as [Tk, d] it is a product whose large factor is
            transposed, which the CPU computes at a third of the speed. A cache lies "sd", a column for each token.
    """
    rows, length, heads, size = q.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    grouped = q.reshape(rows, length, kv_heads, groups, size).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(rows, kv_heads, length * groups, size)
    scores = jnp.einsum(f"bkqd,bk{lie}->bkqs", grouped, keys, preferred_element_type=jnp.float32) * size**-0.5
    scores = scores.reshape(rows, kv_heads, length, groups, -1)
    scores = jnp.where(visible[:, None, :, None, :], scores, HIDDEN)
    peak = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights.reshape(rows, kv_heads, length * groups, -1).astype(values.dtype)
    out = jnp.einsum(f"bkqs,bk{lie}->bkqd", weights, values, preferred_element_type=jnp.float32)
    return PartialSoftmax(out.reshape(rows, kv_heads, length, groups, size), peak, total)


def merge_softmax(one: PartialSoftmax, other: PartialSoftmax) -> PartialSoftmax:
    """Attention over the keys of both parts."""
    peak = jax.lax.stop_gradient(jnp.maximum(one.peak, other.peak))
    left, right = (jnp.exp(jax.lax.stop_gradient(part.peak) - peak) for part in (one, other))
    weighted = left * one.weighted + right * other.weighted
    return PartialSoftmax(weighted, peak, left * one.total + right * other.total)


def finish_softmax(part: PartialSoftmax, dtype: DTypeLike) -> Float[Array, "B Tq H d"]:
    """The heads side by side again, in `dtype`."""
    out = (part.weighted / part.total).astype(dtype).transpose(0, 2, 1, 3, 4)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])
