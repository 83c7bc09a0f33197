"""The physical limits of the pinned cores, measured: f32 matrix products and reads of the memory.

Both are what these cores reach at best in the simplest loop, not what a data sheet says.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from empo2_jax.bench.base import Side

_SIZE = 2048  # rows and columns of the matrices
_FLOATS = 1 << 27  # 512 MiB, more than any cache of these processors
_TRIES = 5


def peaks() -> Side:
    """A side with only the figures `flops` and `bandwidth`, both per second."""
    return Side(run=lambda: None, figures=_figures)


def _figures() -> dict[str, float]:
    matrix = np.random.default_rng(0).standard_normal((_SIZE, _SIZE)).astype(np.float32)
    on_device, product = jnp.asarray(matrix), jax.jit(jnp.matmul)
    seconds = min(
        _best(lambda: product(on_device, on_device).block_until_ready()),
        _best(lambda: matrix @ matrix),
    )
    long = np.ones(_FLOATS, np.float32)
    return {"flops": 2 * _SIZE**3 / seconds, "bandwidth": long.nbytes / _best(lambda: long @ long)}


def _best(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
