"""Branches against plain attention over the one sequence that each of them belongs to; values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empo2_jax.ops.attention import segment_attention
from empo2_jax.ops.branch_attention import branch_attention
from empo2_jax.types import Branches

H, K, D = 4, 2, 8
TRUNK, SIDE = 40, 56
# (sequence, segment, first and last column of the trunk, branches as (cut, length))
LAYOUT = [
    (0, 1, 0, 17, [(5, 9), (5, 2), (17, 11), (1, 21)]),
    (0, 2, 17, 38, [(21, 7)]),
    (1, 1, 0, 40, [(40, 1), (3, 33), (39, 1), (0, 8)]),
]


def batch() -> tuple[np.ndarray, np.ndarray, Branches]:
    """Positions, segments and branches of two rows, with padding at both ends."""
    positions, segments = np.zeros((2, 2, TRUNK + SIDE), np.int32)
    ids, limits = np.zeros((2, 2, SIDE), np.int32)
    free = [0, 0]
    for row, segment, start, stop, branches in LAYOUT:
        positions[row, start:stop], segments[row, start:stop] = np.arange(stop - start), segment
        for cut, length in branches:
            at = slice(free[row], free[row] + length)
            ids[row, at], limits[row, at] = ids[row].max() + 1, start + cut
            positions[row, TRUNK:][at], segments[row, TRUNK:][at] = np.arange(cut, cut + length), segment
            free[row] += length
    return positions, segments, Branches(ids, limits)


def draw(seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(2, TRUNK + SIDE, heads, D) for heads in (H, K, K)]
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


def one_by_one(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    """Each branch as one sequence: the visible trunk and the branch."""
    out = jnp.zeros((2, SIDE, H, D))
    free = [0, 0]
    for row, _, start, _, branches in LAYOUT:
        for cut, length in branches:
            own = TRUNK + free[row] + np.arange(length)
            columns = np.concatenate([start + np.arange(cut), own])
            position = jnp.arange(cut + length, dtype=jnp.int32)[None]
            parts = (x[row, columns][None] for x in (q, k, v))
            found = segment_attention(*parts, position, jnp.ones_like(position), window)
            out = out.at[row, own - TRUNK].set(found[0, cut:])
            free[row] += length
    return out


def together(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, chunk: int) -> jax.Array:
    positions, segments, branches = batch()
    out = branch_attention(q[:, TRUNK:], k, v, jnp.asarray(positions), jnp.asarray(segments), branches, window, chunk)
    return jnp.where((branches.ids > 0)[..., None, None], out, 0.0)


@pytest.mark.parametrize(("window", "chunk"), [(None, 4), (6, 4), (None, 128)])
def test_values_and_gradients_are_those_of_every_branch_alone(window: int | None, chunk: int) -> None:
    def loss(find, *operands):
        return jnp.sum(jnp.sin(find(*operands)) @ jnp.arange(D))

    ours = jax.jit(jax.value_and_grad(lambda *x: loss(together, *x, window, chunk), argnums=(0, 1, 2)))(*draw())
    alone = jax.jit(jax.value_and_grad(lambda *x: loss(one_by_one, *x, window), argnums=(0, 1, 2)))(*draw())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, alone)


def test_padding_is_finite_in_values_and_gradients() -> None:
    positions, segments, branches = batch()
    empty = Branches(np.zeros_like(branches.ids), np.zeros_like(branches.limits))

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return branch_attention(q[:, TRUNK:], k, v, jnp.asarray(positions), jnp.asarray(segments), empty).sum()

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.value_and_grad(total, (0, 1, 2))(*draw())))
