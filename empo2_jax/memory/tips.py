"""Tips: what the policy wrote to itself about finished episodes, kept and found again (paper section 4.1).

A buffer holds entries of one scope (a variation, a task, or everything). Retrieval takes *all* entries whose key is
strictly nearer than a threshold, ranks them by the score of their episode and keeps the first few. Writes become
visible only with `commit`, which the trainer calls once per iteration in episode order. Writing a tip (sampling it)
and showing it (the prompt) are not here; neither is novelty, which has its own store.
"""

import hashlib
import heapq
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float32
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from empo2_jax.errors import CheckpointError
from empo2_jax.memory.base import Embedder, VectorIndex
from empo2_jax.prompts import tip_entry
from empo2_jax.types import Episode, Task, Tip

Scope = Literal["variation", "task", "global"]
Eviction = Literal["fifo", "lowest_score"]
Duplicates = Literal["renew", "drop"]

_VECTORS, _ENTRIES = "tips.safetensors", "tips.jsonl"
_TEXT_FIELDS = ("counter", "buffer", "content", "score", "episode", "step", "policy_version", "iteration")
_RETRIEVALS = ("queries", "hits", "retrieved")
_STATISTICS = (*_RETRIEVALS, "duplicates", "evictions")


def buffer_key(task: Task, scope: Scope) -> str:
    """Name of the buffer that a task reads and writes; tasks of different environments never share by accident."""
    return {"variation": str(task), "task": f"{task.env}/{task.name}", "global": "global"}[scope]


def make_tip_entries(
    episode: Episode, tip_text: str, embeddings: Float32[np.ndarray, "S D"], *, buffer: str, iteration: int
) -> list[Tip]:
    """One entry per step of a valid episode: the tip, the action of that step and the final score out of 100.

    `embeddings` are the keys of the states *before* each action. The score is the extrinsic return rounded to 0.1.
    An empty tip or an invalid episode gives no entries. `commit` replaces the counter of -1.
    """
    tip = " ".join(tip_text.split())
    if not tip or not episode.stop_reason.valid:
        return []
    score = round(episode.extrinsic_return, 1)
    return [
        Tip(
            counter=-1,
            buffer=buffer,
            content=tip_entry(tip, " ".join(step.action.split()), episode.score),
            score=score,
            embedding=embedding,
            episode=episode.id,
            step=number,
            policy_version=episode.policy_version,
            iteration=iteration,
        )
        for number, (step, embedding) in enumerate(zip(episode.steps, embeddings, strict=True))
    ]


@dataclass
class _Buffer:
    """Entries of one scope; the heap orders them by when they leave."""

    index: VectorIndex
    entries: dict[int, Tip] = field(default_factory=dict)  # by counter, ascending
    contents: dict[str, int] = field(default_factory=dict)  # counter of each content
    leaving: list[tuple[float, int]] = field(default_factory=list)  # may still name entries that were renewed


class TipMemory:
    """Buffers of tips with threshold retrieval. `queries`, `hits` … in `metrics()` count over the whole run."""

    def __init__(
        self,
        embedder: Embedder,
        index_factory: Callable[[int], VectorIndex],
        *,
        capacity: int = 1000,
        threshold: float = 0.5,
        top_k: int = 10,
        distinct_episodes: bool = True,
        eviction: Eviction = "fifo",
        duplicates: Duplicates = "renew",
        cache_size: int = 8192,
    ) -> None:
        """Empty memory; `capacity` is per buffer, `cache_size` the number of texts whose vectors are remembered."""
        self._embedder, self._index_factory = embedder, index_factory
        self._capacity, self._threshold, self._top_k = capacity, threshold, top_k
        self._distinct_episodes, self._eviction, self._cache_size = distinct_episodes, eviction, cache_size
        self._duplicates = duplicates
        self._cache: OrderedDict[bytes, Float32[np.ndarray, " D"]] = OrderedDict()
        self._buffers: dict[str, _Buffer] = {}
        self._next_counter = 0
        self._statistics = dict.fromkeys(_STATISTICS, 0)

    def __len__(self) -> int:
        """Entries in all buffers."""
        return sum(len(buffer.entries) for buffer in self._buffers.values())

    def embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "K D"]:
        """Unit vectors of the texts; each distinct text goes through the embedder once while the cache holds it."""
        names = [hashlib.sha256(text.encode()).digest() for text in texts]
        known = {name: self._cache[name] for name in names if name in self._cache}
        missing = {name: text for name, text in zip(names, texts, strict=True) if name not in known}
        if missing:
            known.update(zip(missing, self._embedder.embed(list(missing.values())), strict=True))
        for name in names:
            self._cache[name] = known[name]
            self._cache.move_to_end(name)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return (
            np.stack([known[name] for name in names]) if names else np.zeros((0, self._embedder.dimension), np.float32)
        )

    def retrieve(self, buffer: str, query: Float32[np.ndarray, " D"]) -> list[Tip]:
        """Tips with cosine strictly above the threshold, by score descending (ties: newer first), at most `top_k`."""
        self._statistics["queries"] += 1
        store = self._buffers.get(buffer)
        if store is None:
            return []
        chosen = self._choose(map(store.entries.__getitem__, store.index.best_first(query, self._threshold)))
        self._statistics["hits"] += bool(chosen)
        self._statistics["retrieved"] += len(chosen)
        return chosen

    @property
    def retrievals(self) -> tuple[int, int, int]:
        """Counted so far: queries, queries with a tip, tips retrieved."""
        queries, hits, retrieved = (self._statistics[name] for name in _RETRIEVALS)
        return queries, hits, retrieved

    @retrievals.setter
    def retrievals(self, counts: tuple[int, int, int]) -> None:
        self._statistics.update(zip(_RETRIEVALS, counts, strict=True))

    def retrieve_many(self, requests: Sequence[tuple[str, str]], others: Sequence[str] = ()) -> list[list[Tip]]:
        """`retrieve` for pairs (buffer, key text), embedding all texts in one call; `others`, of keys to come, too."""
        vectors = self.embed([*(text for _, text in requests), *others])[: len(requests)]
        return [self.retrieve(buffer, vector) for (buffer, _), vector in zip(requests, vectors, strict=True)]

    def entries(self, episodes: Sequence[Episode], scope: Scope, iteration: int) -> list[Tip]:
        """What to commit of the episodes that have a tip, in their order."""
        entries: list[Tip] = []
        for episode in episodes:
            if episode.tip and episode.steps:
                vectors = self.embed([step.memory_key for step in episode.steps])
                buffer = buffer_key(episode.task, scope)
                entries += make_tip_entries(episode, episode.tip, vectors, buffer=buffer, iteration=iteration)
        return entries

    def commit(self, tips: Iterable[Tip]) -> int:
        """Make the tips visible, in the given order; returns how many contents were new.

        A content already in its buffer stays one entry: under `drop` the old one stays as it is, under `renew` the new
        one takes its place, so that what is written again and again counts as newest and stays ahead of lone errors of
        equal score. A full buffer evicts, and an evicted content may come again.
        """
        added: dict[str, list[Tip]] = {}
        gone: dict[str, list[int]] = {}
        new = 0
        for tip in tips:
            store, removed = self._buffer(tip.buffer), gone.setdefault(tip.buffer, [])
            known = store.contents.get(tip.content)
            self._statistics["duplicates"] += known is not None
            if known is None:
                new += 1
            elif self._duplicates == "drop":
                continue
            else:
                removed.append(self._remove(store, known))
            tip = replace(tip, counter=self._next_counter)
            self._next_counter += 1
            self._insert(store, tip)
            added.setdefault(tip.buffer, []).append(tip)
            if len(store.entries) > self._capacity:
                removed.append(self._evict(store))
        for name, entries in added.items():
            self._update_index(self._buffers[name], entries, gone[name])
        return new

    def metrics(self) -> dict[str, int]:
        """Size and run-long counters: queries, hits (queries with a tip), retrieved, duplicates, evictions."""
        return {"size": len(self), "buffers": len(self._buffers), **self._statistics}

    def dump(self, folder: Path) -> None:
        """Write the memory into `folder` (created if needed): the same memory gives the same bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        vectors, lines = self._serialized()
        (folder / _VECTORS).write_bytes(vectors)
        (folder / _ENTRIES).write_bytes(lines)

    def load(self, folder: Path) -> None:
        """Replace the memory by a dumped one; raises `CheckpointError` if the files are missing or do not fit."""
        try:
            embeddings = load_file(folder / _VECTORS)["embeddings"]
            header, *rows = map(json.loads, (folder / _ENTRIES).read_text(encoding="utf-8").splitlines())
            tips = [Tip(**row, embedding=vector) for row, vector in zip(rows, embeddings, strict=True)]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(f"no tips can be read from {folder}: {error}") from error
        if embeddings.shape[1] != self._embedder.dimension:
            found = f"{embeddings.shape[1]} dimensions, the embedder has {self._embedder.dimension}"
            raise CheckpointError(f"tips in {folder} have {found}")
        self._buffers = {}
        for tip in tips:
            self._insert(self._buffer(tip.buffer), tip)
        for store in self._buffers.values():
            self._update_index(store, list(store.entries.values()), [])
        self._next_counter, self._statistics = header["next_counter"], header["statistics"]

    def content_hash(self) -> str:
        """SHA-256 of everything that `dump` writes."""
        return hashlib.sha256(b"\0".join(self._serialized())).hexdigest()

    def _choose(self, ranked: Iterable[Tip]) -> list[Tip]:
        """The first `top_k`; reads no further, since what comes next may cost a scan."""
        if not self._distinct_episodes:
            return list(islice(ranked, self._top_k))
        first: dict[str, Tip] = {}
        for tip in ranked:
            first.setdefault(tip.episode, tip)
            if len(first) == self._top_k:
                break
        return list(first.values())

    def _buffer(self, name: str) -> _Buffer:
        if name not in self._buffers:
            self._buffers[name] = _Buffer(self._index_factory(self._embedder.dimension))
        return self._buffers[name]

    def _insert(self, store: _Buffer, tip: Tip) -> None:
        store.entries[tip.counter] = tip
        store.contents[tip.content] = tip.counter
        heapq.heappush(store.leaving, (tip.score if self._eviction == "lowest_score" else 0.0, tip.counter))

    def _evict(self, store: _Buffer) -> int:
        self._statistics["evictions"] += 1
        while (counter := heapq.heappop(store.leaving)[1]) not in store.entries:
            pass
        return self._remove(store, counter)

    @staticmethod
    def _remove(store: _Buffer, counter: int) -> int:
        del store.contents[store.entries.pop(counter).content]
        return counter

    @staticmethod
    def _update_index(store: _Buffer, new: list[Tip], evicted: list[int]) -> None:
        """Entries that came and went within one commit never reach the index."""
        fresh = {tip.counter for tip in new}
        store.index.remove([counter for counter in evicted if counter not in fresh])
        staying = [tip for tip in new if tip.counter in store.entries]
        if staying:
            counters, scores = [tip.counter for tip in staying], [tip.score for tip in staying]
            store.index.add(counters, np.stack([tip.embedding for tip in staying]), scores)

    def _serialized(self) -> tuple[bytes, bytes]:
        tips = sorted(
            (tip for store in self._buffers.values() for tip in store.entries.values()), key=lambda t: t.counter
        )
        embeddings = np.array([tip.embedding for tip in tips], np.float32).reshape(len(tips), self._embedder.dimension)
        header = {"next_counter": self._next_counter, "statistics": self._statistics}
        rows = [header, *({name: getattr(tip, name) for name in _TEXT_FIELDS} for tip in tips)]
        return save({"embeddings": embeddings}), "".join(json.dumps(row) + "\n" for row in rows).encode()
