"""Count-based novelty: the intrinsic reward of a state is coefficient / number of visits (paper section 4.3).

A store holds, per task variation, distinct states as (embedding, visits). A state visits its nearest entry if the
cosine reaches the threshold, else it becomes an entry. While an iteration runs the store does not change: an
episode sees the visits committed before the iteration plus its own. It is separate from the tips, and evaluation
never touches it.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float32
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from empo2_jax.errors import CheckpointError
from empo2_jax.memory.base import VectorIndex
from empo2_jax.types import Task

_VECTORS, _VISITS = "novelty.safetensors", "novelty.json"


@dataclass(frozen=True)
class PendingVisits:
    """What one episode will add to the store at the end of the iteration."""

    key: str
    known: dict[int, int]  # entry of the store → visits by this episode
    new_embeddings: Float32[np.ndarray, "M D"]  # entries this episode made
    new_visits: tuple[int, ...]  # its visits to each of them


def novelty_key(task: Task) -> str:
    """Name of the set of states that a task counts in: environment, task and variation."""
    return str(task)


class NoveltyStore:
    """Visited states and their counts."""

    def __init__(
        self,
        dimension: int,
        index_factory: Callable[[int], VectorIndex],
        *,
        threshold: float = 0.95,
        coefficient: float = 1.0,
        revisits: bool = True,
        kind: Literal["count", "none"] = "count",
    ) -> None:
        """Empty store. `coefficient` is in score points; without `revisits` only a new entry is paid.

        Kind `none` pays nothing and stores nothing.
        """
        self._dimension, self._index_factory = dimension, index_factory
        self._threshold, self._coefficient, self._revisits, self._kind = threshold, coefficient, revisits, kind
        self._indexes: dict[str, VectorIndex] = {}
        self._visits: dict[str, list[int]] = {}  # by entry id: 0, 1, … in order of arrival
        self._embeddings: dict[str, list[Float32[np.ndarray, " D"]]] = {}

    def __len__(self) -> int:
        """Entries under all keys."""
        return sum(map(len, self._visits.values()))

    def visits(self, key: str) -> tuple[int, ...]:
        """Committed visits of the entries of a key, in order of their arrival."""
        return tuple(self._visits.get(key, ()))

    def episode_rewards(
        self, key: str, embeddings: Float32[np.ndarray, "S D"]
    ) -> tuple[Float32[np.ndarray, " S"], PendingVisits]:
        """Rewards of the states that the S actions of one episode reached, and the visits to commit later.

        Changes nothing: episodes of an iteration may be asked in any order.
        """
        rewards = np.zeros(len(embeddings), np.float32)
        known: dict[int, int] = {}
        own = self._index_factory(self._dimension)
        own_rows: list[int] = []
        own_visits: list[int] = []
        for step, embedding in enumerate(embeddings if self._kind == "count" else ()):
            entry, cosine = self._nearest(key, embedding)
            own_entry, own_cosine = own.nearest(embedding)
            is_new = max(cosine, own_cosine) < self._threshold
            if is_new:
                own.add([len(own_visits)], embedding[None])
                own_rows.append(step)
                own_visits.append(1)
                count = 1
            elif cosine >= own_cosine:
                known[entry] = known.get(entry, 0) + 1
                count = self._visits[key][entry] + known[entry]
            else:
                own_visits[own_entry] += 1
                count = own_visits[own_entry]
            rewards[step] = self._coefficient / count if is_new or self._revisits else 0.0
        return rewards, PendingVisits(key, known, embeddings[own_rows], tuple(own_visits))

    def commit(self, pending: Iterable[PendingVisits]) -> None:
        """Add the visits of the iteration's episodes, in episode order.

        An entry that two episodes made becomes one: the later joins its nearest entry by the same threshold.
        """
        for episode in pending:
            for entry, count in episode.known.items():
                self._visits[episode.key][entry] += count
            for embedding, count in zip(episode.new_embeddings, episode.new_visits, strict=True):
                entry, cosine = self._nearest(episode.key, embedding)
                if cosine >= self._threshold:
                    self._visits[episode.key][entry] += count
                else:
                    self._append(episode.key, embedding, count)

    def metrics(self) -> dict[str, int]:
        """Entries (`distinct_states`), keys, and committed visits."""
        visits = sum(map(sum, self._visits.values()))
        return {"distinct_states": len(self), "keys": len(self._visits), "visits": visits}

    def dump(self, folder: Path) -> None:
        """Write the store into `folder` (created if needed): the same store gives the same bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        vectors, visits = self._serialized()
        (folder / _VECTORS).write_bytes(vectors)
        (folder / _VISITS).write_bytes(visits)

    def load(self, folder: Path) -> None:
        """Replace the store by a dumped one; raises `CheckpointError` if the files are missing or do not fit."""
        try:
            embeddings = load_file(folder / _VECTORS)["embeddings"]
            visits = json.loads((folder / _VISITS).read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"no novelty store can be read from {folder}: {error}") from error
        expected = (sum(map(len, visits.values())), self._dimension)
        if embeddings.shape != expected:
            raise CheckpointError(f"{folder}/{_VECTORS} has shape {embeddings.shape}, expected {expected}")
        self._indexes, self._visits, self._embeddings = {}, {}, {}
        rows = iter(embeddings)
        for key, counts in visits.items():
            for count in counts:
                self._append(key, next(rows), count)

    def content_hash(self) -> str:
        """SHA-256 of everything that `dump` writes."""
        return hashlib.sha256(b"\0".join(self._serialized())).hexdigest()

    def _nearest(self, key: str, embedding: Float32[np.ndarray, " D"]) -> tuple[int, float]:
        return self._indexes[key].nearest(embedding) if key in self._indexes else (-1, -np.inf)

    def _append(self, key: str, embedding: Float32[np.ndarray, " D"], count: int) -> None:
        if key not in self._indexes:
            self._indexes[key] = self._index_factory(self._dimension)
            self._visits[key], self._embeddings[key] = [], []
        self._indexes[key].add([len(self._visits[key])], embedding[None])
        self._visits[key].append(count)
        self._embeddings[key].append(embedding)

    def _serialized(self) -> tuple[bytes, bytes]:
        keys = sorted(self._visits)
        rows = [embedding for key in keys for embedding in self._embeddings[key]]
        embeddings = np.array(rows, np.float32).reshape(len(rows), self._dimension)
        return save({"embeddings": embeddings}), json.dumps({key: self._visits[key] for key in keys}).encode()
