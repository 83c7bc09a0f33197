"""Protocols of the memory: text to unit vectors, nearest neighbours among unit vectors, and rewards for novel ones."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int64


@runtime_checkable
class Embedder(Protocol):
    """Text to unit vectors."""

    dimension: int

    def embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "K D"]:
        """Unit-norm rows; the result of a text does not depend on the others in the call."""
        ...


@runtime_checkable
class VectorIndex(Protocol):
    """Unit vectors under stable integer ids, with exact threshold search."""

    def add(
        self, ids: Sequence[int], vectors: Float32[np.ndarray, "K D"], scores: Sequence[float] | None = None
    ) -> None:
        """Insert; an id must be new. `scores` (default: all 0) rank the answers of `best_first`."""
        ...

    def remove(self, ids: Sequence[int]) -> None:
        """Delete; an id must be present."""
        ...

    def above(self, query: Float32[np.ndarray, " D"], threshold: float) -> Int64[np.ndarray, " hits"]:
        """Ids of *all* vectors with cosine strictly > threshold, ascending. Exact, whatever the implementation."""
        ...

    def best_first(self, query: Float32[np.ndarray, " D"], threshold: float) -> Iterator[int]:
        """The ids of `above` by score descending (ties: highest id), one by one: who stops early saves the rest.

        The index must not change while the answer is read.
        """
        ...

    def nearest(self, query: Float32[np.ndarray, " D"]) -> tuple[int, float]:
        """Id and cosine of the nearest vector (ties: lowest id); (-1, -inf) when empty. Exact."""
        ...

    def __len__(self) -> int: ...


@runtime_checkable
class Novelty(Protocol):
    """Rewards for novel states; changes with `commit` alone, so that episodes may be asked in any order."""

    def episode_rewards(
        self, key: str, embeddings: Float32[np.ndarray, "S D"]
    ) -> tuple[Float32[np.ndarray, " S"], Any]:
        """Points for the states that the S actions of an episode of task `key` reached; what to `commit` of it."""
        ...

    def commit(self, pending: Iterable[Any]) -> None:
        """Take in the states of an iteration's episodes, in episode order."""
        ...

    def metrics(self) -> dict[str, int]:
        """Counts for `novelty/*`."""
        ...

    def dump(self, folder: Path) -> None:
        """Write everything into `folder`, created if needed: the same content gives the same bytes."""
        ...

    def load(self, folder: Path) -> None:
        """Replace everything by a dump; raises `CheckpointError` if it is missing or does not fit."""
        ...
