"""Suite `publish`: parameters become a version that engines can load, against what is written without thinking.

The naive way brings all parameters to the host in f32 and writes one file. Both write to a real folder (that of
temporary files) and are done when their bytes are on the disk. Every run publishes other values than the run before, so
that nothing is linked. A delta is compared with the whole version, after a step of Adam's size at a learning rate of
1e-6. The proof: what a reader finds on the disk is the same on both sides, and the parameters, to the last bit of bf16.
"""

import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, UInt8
from safetensors.numpy import load_file, save_file

from empo2_jax.bench.base import Case, Side
from empo2_jax.bench.shapes import SHAPES, make_model
from empo2_jax.errors import SyncError
from empo2_jax.models.hf_weights import Params, named
from empo2_jax.sync.delta import Receiver
from empo2_jax.sync.orbax_publish import Publisher
from empo2_jax.sync.tensor_file import DTYPES, Tensor, raw

LEARNING_RATE = 1e-6
Change = Callable[[Array], Array]


def cases(quick: bool) -> list[Case]:
    """A version of 0.5B parameters (in a quick run 33M) against an f32 file, and a delta against a version."""
    shape = "small" if quick else "0.5B"
    return [
        _case(f"publish/{shape}", "version", "naive", shape),
        _case(f"publish/{shape}, delta", "delta", "whole", shape),
    ]


def _case(name: str, ours: str, peer: str, shape: str) -> Case:
    here = "empo2_jax.bench.publish"
    return Case(name, f"{here}:{ours}", f"{here}:{peer}", {"shape": shape}, {"digest": 0.0}, unit="version")


class _Published(NamedTuple):
    """Seconds until the trainer could go on, seconds until all was there, bytes on the disk of one version."""

    blocked: float
    seconds: float
    size: int


def version(shape: str) -> Side:
    """All values change."""
    return _publishing(shape, _scaled, full_every=1)


def whole(shape: str) -> Side:
    """The same where few values change."""
    return _publishing(shape, _stepped, full_every=1)


def delta(shape: str) -> Side:
    """Only what changed is written; read back by the receiver of deltas."""
    return _publishing(shape, _stepped, full_every=1 << 30)


def naive(shape: str) -> Side:
    """One f32 file."""
    folder = tempfile.TemporaryDirectory(prefix="empo2-bench-publish-")
    path = Path(folder.name) / "model.safetensors"

    def write(params: Params, number: int) -> _Published:
        began = time.perf_counter()
        save_file({name: np.asarray(value[...]) for name, value in named(params).items()}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        return _Published(seconds, seconds, path.stat().st_size)

    return _side(shape, _scaled, write, lambda: load_file(path), folder.cleanup)


def _publishing(shape: str, change: Change, full_every: int) -> Side:
    folder = tempfile.TemporaryDirectory(prefix="empo2-bench-publish-")
    root, config = Path(folder.name), SHAPES[shape]
    publisher = Publisher(root, config, keep=1, orbax=False, full_every=full_every)

    def write(params: Params, number: int) -> _Published:
        began = time.perf_counter()
        pending = publisher.publish(params, number)
        blocked = time.perf_counter() - began
        path = pending.wait()
        seconds = time.perf_counter() - began
        return _Published(blocked, seconds, sum(file.stat().st_size for file in path.iterdir()))

    def close() -> None:
        publisher.close()
        folder.cleanup()

    return _side(shape, change, write, Receiver(root, config).follow, close)


def _side(
    shape: str,
    change: Change,
    write: Callable[[Params, int], _Published],
    read: Callable[[], Mapping[str, Tensor]],
    close: Callable[[], None],
) -> Side:
    """Two sets of parameters in turn; the first two writes compile, and are what a delta is based on."""
    first = nnx.split(make_model(shape))[1]
    both = first, jax.jit(partial(jax.tree.map, change))(first)
    written: list[_Published] = []

    def run() -> None:
        written.append(write(both[len(written) % 2], len(written)))

    def answer() -> dict[str, UInt8[np.ndarray, " bytes"]]:
        """Of what is on the disk, once that is shown to be what was given; then the folder goes."""
        last = {name: np.asarray(value[...]) for name, value in named(both[(len(written) - 1) % 2]).items()}
        found, wanted = _digest(read()), _digest(last)
        close()
        if not np.array_equal(found, wanted):
            raise SyncError("what is on the disk is not what was published")
        return {"digest": found}

    def figures() -> dict[str, float]:
        timed = written[2:]
        return {
            "blocked_seconds": statistics.median(one.blocked for one in timed),
            "gb_per_second": 2 * SHAPES[shape].num_parameters / statistics.median(one.seconds for one in timed) / 1e9,
            "bytes": float(timed[-1].size),
        }

    run()
    run()
    return Side(run, answer, figures)


def _digest(tensors: Mapping[str, Tensor]) -> UInt8[np.ndarray, " bytes"]:
    """Hash of all values as bf16."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + raw(tensors[name].astype(DTYPES["bfloat16"])).data)
    return np.frombuffer(digest.digest(), np.uint8)


def _scaled(values: Array) -> Array:
    return values * 1.01


def _stepped(values: Array) -> Array:
    """As after Adam's first step."""
    signs = 1.0 - 2.0 * (jnp.arange(values.size) % 2)
    return values + LEARNING_RATE * signs.reshape(values.shape)
