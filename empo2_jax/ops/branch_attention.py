"""Attention of side branches: a joint softmax over a prefix of the trunk and the branch itself.

A token of a branch sees the trunk of its row up to the branch's cut, and its own branch up to itself. Queries go in
chunks: each reads so much of the trunk as the longest prefix in it needs, and all read so many chunks of branches
before their own as the longest branch needs. Both are chosen while running among a few static sizes (`lax.switch`), so
that neither a [N, N] array nor much work for keys that nothing sees exists. The trunk's own attention is
`segment_attention`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from empo2_jax.ops.attention import (
    HIDDEN,
    QUERY_CHUNK,
    PartialSoftmax,
    causal,
    finish_softmax,
    merge_softmax,
    partial_softmax,
)
from empo2_jax.types import Branches

_SPANS = 16  # sizes of the visible trunk
_Operands = tuple[Array, Array, Array]  # queries, keys, values


def branch_attention(
    q: Float[Array, "B N H d"],
    k: Float[Array, "B L K d"],
    v: Float[Array, "B L K d"],
    positions: Int32[Array, "B L"],
    segment_ids: Int32[Array, "B L"],
    branches: Branches,
    window: int | None = None,
    chunk: int = QUERY_CHUNK,
) -> Float[Array, "B N H d"]:
    """Attention of the branches of packed rows, which are the last N of L columns.

    Args:
        q: Queries of the branches alone, already rotated; `H` is a multiple of `K`.
        k: Keys of the whole rows, already rotated.
        v: Values of the whole rows.
        positions: Position in the sequence that the branch belongs to: those of a branch go on from its cut.
        segment_ids: Segment of each token; a branch has that of its trunk. 0 is padding: finite, meaningless outputs.
        branches: What each query sees.
        window: A query sees its own and the `window - 1` tokens before it; `None` sees all.
        chunk: Queries per chunk.
    """
    rows, length = branches.ids.shape
    trunk = k.shape[1] - length
    chunk = min(chunk, length)
    pad = -length % chunk

    def padded(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))

    def split(x: Array) -> Array:
        return x.reshape(rows, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    ids, limits = padded(jnp.asarray(branches.ids)), padded(jnp.asarray(branches.limits))
    queries = split(padded(q))
    side = (split(padded(x[:, trunk:])) for x in (positions, segment_ids))
    places = (*side, split(ids), split(limits))
    spans, pasts = _spans(trunk, chunk), _pasts(queries.shape[0])

    over_own = [partial(_attend_own, past=past, window=window) for past in (*pasts, None)]
    past = jnp.searchsorted(chunk * jnp.asarray(pasts), _keys_before(ids, chunk))
    own_keys = (_laid(split(padded(k[:, trunk:]))), _laid(split(padded(v[:, trunk:]))))
    own = _switch(over_own, past, (queries, *own_keys), places)

    over_trunk = [partial(_attend_trunk, stop=stop, window=window) for stop in spans]
    span = jnp.searchsorted(jnp.asarray(spans), places[-1].max(axis=(1, 2)))
    trunk_keys = (_laid(k[:, :trunk]), _laid(v[:, :trunk]))
    trunk_places = (positions[:, :trunk], segment_ids[:, :trunk])

    def attend(piece: tuple[Any, ...]) -> PartialSoftmax:
        query, place, index = piece
        return _switch(over_trunk, index, (query, *trunk_keys), (place, trunk_places))

    both = merge_softmax(own, jax.lax.map(attend, (queries, places, span)))
    out = jax.vmap(partial(finish_softmax, dtype=q.dtype))(both)
    return out.swapaxes(0, 1).reshape(rows, -1, *q.shape[2:])[:, :length]


def _laid(x: Float[Array, "*batch L K d"]) -> Float[Array, "*batch K d L"]:
    return jnp.moveaxis(x, -3, -1)


def _spans(trunk: int, chunk: int) -> list[int]:
    """Keys of the trunk that a chunk may read: none, or a few multiples of the chunk up to all."""
    step = chunk * -(-trunk // (chunk * _SPANS))
    return [0, *range(step, trunk, step), trunk]


def _pasts(chunks: int) -> list[int]:
    """Chunks before its own that a query may read; beyond the last number it reads all."""
    return [count for count in (0, 1, 2, 3, 4, 8, 16) if count < chunks - 1 or count == 0]


def _keys_before(ids: Int32[Array, "B N"], chunk: int) -> Int32[Array, ""]:
    """How far before a chunk the earliest branch in it begins, at most."""
    column = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    start = jax.lax.cummax(jnp.where(begins | (ids == 0), column, 0), axis=1)
    return (column - column % chunk - start).max()


def _attend_trunk(operands: _Operands, places: tuple[Any, ...], *, stop: int, window: int | None) -> PartialSoftmax:
    """One chunk of queries over the first `stop` columns."""
    q, keys, values = operands
    (query_positions, query_segments, _, limits), (positions, segments) = places
    if stop == 0:
        return _nothing(q, keys.shape[1])
    visible = query_segments[:, :, None] == segments[:, None, :stop]
    visible &= jnp.arange(stop, dtype=jnp.int32)[None, None] < limits[:, :, None]
    visible &= causal(query_positions, positions[:, None, :stop], window)
    return partial_softmax(q, keys[..., :stop], values[..., :stop], visible)


def _attend_own(
    operands: _Operands, places: tuple[Array, ...], *, past: int | None, window: int | None
) -> PartialSoftmax:
    """Every chunk of queries [chunks, B, chunk, …] over itself and `past` chunks before it, or over all."""
    q, *pairs = operands
    seen = (*pairs, places[0], places[2])  # keys, values, positions, branches

    def before(x: Array) -> Array:
        late = jnp.pad(x, [(past or 0, 0)] + [(0, 0)] * (x.ndim - 1))
        return jnp.concatenate([late[shift : shift + len(x)] for shift in range(1 + (past or 0))], axis=-1)

    @jax.checkpoint
    def attend(
        query: tuple[Array, Array, Array], keys: Array, values: Array, positions: Array, ids: Array
    ) -> PartialSoftmax:
        q, query_positions, query_ids = query
        visible = query_ids[:, :, None] == ids[:, None]
        visible &= causal(query_positions, positions[:, None], window)
        return partial_softmax(q, keys, values, visible)

    queries = (q, places[0], places[2])
    if past is None:
        whole = [jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1) for x in seen]
        return jax.lax.map(lambda query: attend(query, *whole), queries)
    return jax.lax.map(lambda piece: attend(piece[0], *piece[1]), (queries, tuple(map(before, seen))))


def _nothing(q: Float[Array, "B Tq H d"], kv_heads: int) -> PartialSoftmax:
    rows, length, heads, size = q.shape
    weighted = jnp.zeros((rows, kv_heads, length, heads // kv_heads, size), jnp.float32)
    return PartialSoftmax(weighted, jnp.full_like(weighted[..., :1], HIDDEN), weighted[..., :1])


def _switch(
    functions: Sequence[Callable[[_Operands, Any], PartialSoftmax]],
    index: Int32[Array, ""],
    operands: _Operands,
    places: Any,
) -> PartialSoftmax:
    """`lax.switch` whose backward pass computes the chosen function again.

    Left alone it keeps what the backward pass of any of the functions would need, with zeros for those not chosen.
    """

    @jax.custom_vjp
    def run(index: Array, operands: Any, places: Any) -> PartialSoftmax:
        return jax.lax.switch(index, functions, operands, places)

    def forward(index: Array, operands: Any, places: Any) -> tuple[PartialSoftmax, Any]:
        return run(index, operands, places), (index, operands, places)

    def backward(kept: Any, gradient: PartialSoftmax) -> tuple[None, Any, None]:
        def of(function: Callable[..., PartialSoftmax]) -> Callable[..., Any]:
            return lambda operands, places, gradient: jax.vjp(lambda x: function(x, places), operands)[1](gradient)[0]

        return None, jax.lax.switch(kept[0], [of(function) for function in functions], *kept[1:], gradient), None

    run.defvjp(forward, backward)
    return run(index, operands, places)
