"""Suite `memory`: finding tips, against a memory behind HTTP and against a full scan. The embedder is on neither side.

Keys lie in clusters as the states of a world do: a query is near its own cluster and far from all others.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from empo2_jax.bench.base import Case, Side
from empo2_jax.memory.exact_index import ExactIndex
from empo2_jax.memory.hashing_embedder import HashingEmbedder
from empo2_jax.memory.tips import TipMemory
from empo2_jax.types import Tip

DIMENSION, THRESHOLD, TOP_K = 384, 0.5, 10
_TO_CENTER = 0.85  # cosine of a key and its cluster's center; two keys of a cluster have its square
_PER_EPISODE = 10  # entries
_COMPARED = 20  # queries whose answers are compared


def cases(quick: bool) -> list[Case]:
    """The paper's capacity over HTTP; a hundred times that, with common and with rare hits, against a scan."""
    scan = "empo2_jax.bench.memory:full_scan"
    return [
        _case("1,000 entries, HTTP + loop", 1_000, 64, "empo2_jax.bench.http_peer:peer", 20),
        _case("100,000 entries, full scan", 100_000, 64, scan, 20),
        _case("100,000 entries, rare hits", 100_000, 10_000, scan, 2),
    ]


def _case(name: str, entries: int, clusters: int, peer: str, queries: int) -> Case:
    return Case(
        name=f"memory/{name}",
        ours="empo2_jax.bench.memory:ours",
        peer=peer,
        arguments={"entries": entries, "clusters": clusters, "queries": queries},
        tolerances={"ids": 0.0},
        unit="query",
    )


class World(NamedTuple):
    """Entries by id, which is their order of arrival, and queries."""

    keys: Float32[np.ndarray, "N D"]
    scores: Int64[np.ndarray, " N"]
    queries: Float32[np.ndarray, "Q D"]

    def episode(self, entry: int) -> int:
        """Which episode wrote an entry."""
        return entry // _PER_EPISODE


def make_world(entries: int, clusters: int) -> World:
    """Unit vectors and scores from 0 to 100."""
    generator = np.random.default_rng(0)
    centers = _unit(generator, clusters)

    def near(count: int) -> Float32[np.ndarray, "count D"]:
        chosen = centers[generator.integers(0, clusters, count)]
        keys = _TO_CENTER * chosen + math.sqrt(1 - _TO_CENTER**2) * _unit(generator, count)
        return (keys / np.linalg.norm(keys, axis=1, keepdims=True)).astype(np.float32)

    return World(near(entries), generator.integers(0, 101, entries), near(256))


def _unit(generator: np.random.Generator, count: int) -> Float32[np.ndarray, "count D"]:
    vectors = generator.standard_normal((count, DIMENSION), np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def best_of(world: World, hits: Sequence[int]) -> list[int]:
    """The ids to show of all above the threshold: best score first, then newest, one per episode."""
    first: dict[int, int] = {}
    for entry in sorted(hits, key=lambda entry: (-int(world.scores[entry]), -entry)):
        first.setdefault(world.episode(entry), entry)
    return list(first.values())[:TOP_K]


def side(find: Callable[[Float32[np.ndarray, " D"]], list[int]], world: World, queries: int) -> Side:
    """A side that answers `queries` queries in a run.

    Args:
        find: Ids for a query.
        world: Where the queries come from.
        queries: Taken in turn from those of the world.
    """
    chosen = [world.queries[number % len(world.queries)] for number in range(queries)]

    def run() -> None:
        for query in chosen:
            find(query)

    def answer() -> dict[str, Int64[np.ndarray, "Q K"]]:
        ids = np.full((_COMPARED, TOP_K), -1)
        for row, query in zip(ids, world.queries, strict=False):
            found = find(query)
            row[: len(found)] = found
        return {"ids": ids}

    run()
    return Side(run, answer=answer, work=queries)


def ours(entries: int, clusters: int, queries: int) -> Side:
    """The trainer's memory; fifty times the peer's queries, since so few would not be seen by the clock."""
    world = make_world(entries, clusters)
    memory = TipMemory(HashingEmbedder(DIMENSION), ExactIndex, capacity=entries, threshold=THRESHOLD, top_k=TOP_K)
    memory.commit(
        Tip(-1, "bench", f"tip {entry}", float(score), key, f"episode {world.episode(entry)}", entry, 0, 0)
        for entry, (key, score) in enumerate(zip(world.keys, world.scores, strict=True))
    )
    return side(lambda query: [tip.counter for tip in memory.retrieve("bench", query)], world, 50 * queries)


def full_scan(entries: int, clusters: int, queries: int) -> Side:
    """One matrix product over all entries, then all hits sorted."""
    world = make_world(entries, clusters)

    def find(query: Float32[np.ndarray, " D"]) -> list[int]:
        return best_of(world, np.flatnonzero(world.keys @ query > THRESHOLD).tolist())

    return side(find, world, queries)
