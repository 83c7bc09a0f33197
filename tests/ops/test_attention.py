"""Attention against a loop over tokens, and its identities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empo2_jax.ops.attention import cached_attention, segment_attention

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def heads(rows: int, length: int, seed: int = 0) -> Arrays:
    """Queries of 4 heads, keys and values of 2, size 8."""
    draw = np.random.default_rng(seed)
    return tuple(draw.normal(size=(rows, length, count, 8)).astype(np.float32) for count in (4, 2, 2))


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, last: int, head: int) -> np.ndarray:
    """Output of the query at `last` over the keys `first` to `last`; query heads 0, 1 use key head 0; 2, 3 use 1."""
    scores = k[first : last + 1, head // 2] @ q[last, head] / np.sqrt(8)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ v[first : last + 1, head // 2]


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("chunk", [16, 4, 5])
def test_each_token_sees_its_segment_up_to_itself(window: int | None, chunk: int) -> None:
    q, k, v = heads(1, 11)
    starts = [0] * 6 + [6] * 3
    positions = np.array([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 0]], np.int32)
    segments = np.array([[1] * 6 + [2] * 3 + [0] * 2], np.int32)
    out = np.asarray(segment_attention(*map(jnp.asarray, (q, k, v, positions, segments)), window, chunk))
    for token, start in enumerate(starts):
        first = start if window is None else max(start, token - window + 1)
        for head in range(4):
            np.testing.assert_allclose(out[0, token, head], by_hand(q[0], k[0], v[0], first, token, head), atol=1e-5)
    assert np.isfinite(out).all()


def test_chunks_change_neither_values_nor_gradients() -> None:
    q, k, v = map(jnp.asarray, heads(2, 24))
    positions = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), (2, 24))
    segments = jnp.ones((2, 24), jnp.int32)

    def loss(chunk: int) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(segment_attention(q, k, v, positions, segments, None, chunk)))

        return jax.value_and_grad(total, argnums=(0, 1, 2))(q, k, v)

    whole, chunked = loss(32), loss(7)
    np.testing.assert_allclose(whole[0], chunked[0], rtol=1e-5)
    for expected, got in zip(whole[1], chunked[1], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_long_rows_never_hold_a_square_of_scores() -> None:
    length = 4096
    shapes = [jax.ShapeDtypeStruct((1, length, count, 8), jnp.float32) for count in (2, 1, 1)]
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        return segment_attention(q, k, v, positions, segments).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes, ids, ids).compile()
    square = 2 * length * length * 4
    assert compiled.memory_analysis().temp_size_in_bytes < square


@pytest.mark.parametrize("window", [None, 3])
def test_cached_attention_equals_the_rows_of_segment_attention(window: int | None) -> None:
    q, k, v = map(jnp.asarray, heads(2, 9))
    positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9))
    expected = segment_attention(q, k, v, positions, jnp.ones((2, 9), jnp.int32), window)
    poison = ((0, 0), (0, 0), (0, 4), (0, 0))  # columns beyond the query must not matter
    keys, values = (jnp.pad(x.swapaxes(1, 2), poison, constant_values=1e3) for x in (k, v))
    got = cached_attention(q[:, 6:], keys, values, positions[:, 6:], window)
    np.testing.assert_allclose(got, expected[:, 6:], atol=1e-5)
