"""Nearest neighbors through ScaNN (Guo et al. 2020, arXiv 1908.10396), with answers checked for completeness.

ScaNN returns the k best; the memory asks for *all* above a threshold. So k grows until the last neighbor lies
below the threshold: the answer is then `certified`, and its candidates are scored again in float64 from the stored
vectors. Whatever cannot be certified is answered by a full scan and counted in `fallbacks`.

Up to `tree_above` vectors ScaNN runs in brute-force mode, where the certificate is a proof. Above, it searches a
tree, where the certificate says only that nothing was cut off at k: a neighbor in a leaf that was not searched can
be missing. Every `audit_every`-th answer of the tree is therefore compared with a full scan (`audits`, and `missed`
neighbors), and `nearest` always scans. Pass `tree_above=None` for exact answers at any size.
"""

import os
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from empo2_jax.errors import ConfigError
from empo2_jax.memory.exact_index import ROUNDING_MARGIN, ExactIndex, best, exact_cosines

_FIRST_NEIGHBORS = 32
_GROWTH = 4
_LARGEST_SHARE = 0.25  # of all vectors asked for as neighbors; beyond it a scan is faster


class ScannIndex:
    """`VectorIndex` that asks ScaNN first. Counters: `certified`, `fallbacks`, `audits`, `missed`."""

    def __init__(
        self,
        dimension: int,
        *,
        exact_below: int = 32,
        tree_above: int | None = 20_000,
        audit_every: int = 64,
    ) -> None:
        """Empty index for `dimension` floats; ScaNN is used from `exact_below` vectors on, its tree above `tree_above`.

        Raises `ConfigError` where ScaNN is not installed.
        """
        self._scann = _load_scann()
        self._exact = ExactIndex(dimension)
        self._exact_below, self._tree_above, self._audit_every = exact_below, tree_above, audit_every
        self._searcher: Any = None
        self._is_tree = False
        self._built_size = 0
        self.certified = 0
        self.fallbacks = 0
        self.audits = 0
        self.missed = 0

    def __len__(self) -> int:
        """Number of vectors."""
        return len(self._exact)

    def add(
        self, ids: Sequence[int], vectors: Float32[np.ndarray, "K D"], scores: Sequence[float] | None = None
    ) -> None:
        """Insert; raises `ValueError`, and changes nothing, if an id is repeated or already present."""
        self._exact.add(ids, vectors, scores)
        if self._searcher is not None and ids:
            self._searcher.upsert([str(item) for item in ids], vectors, batch_size=len(ids))

    def remove(self, ids: Sequence[int]) -> None:
        """Delete; raises `KeyError` at the first id that is not present."""
        for item in ids:
            self._exact.remove([item])
            if self._searcher is not None:
                self._searcher.delete([str(item)])

    def above(self, query: Float32[np.ndarray, " D"], threshold: float) -> Int64[np.ndarray, " hits"]:
        """Ids of all vectors with cosine strictly > threshold, ascending (see the module docstring for trees)."""
        candidates = self._candidates(query, threshold) if self._ready() else None
        if candidates is None:
            self.fallbacks += 1
            return self._exact.above(query, threshold)
        self.certified += 1
        cosines = exact_cosines(self._exact.vectors(candidates), query)
        hits = np.sort(np.array(candidates, np.int64)[cosines > threshold])
        if self._is_tree and self.certified % self._audit_every == 0:
            return self._audit(hits, self._exact.above(query, threshold))
        return hits

    def best_first(self, query: Float32[np.ndarray, " D"], threshold: float) -> Iterator[int]:
        """The ids of `above` by score descending (ties: highest id)."""
        hits = self.above(query, threshold)
        yield from hits[np.lexsort((-hits, -self._exact.scores(hits.tolist())))].tolist()

    def nearest(self, query: Float32[np.ndarray, " D"]) -> tuple[int, float]:
        """Id and cosine of the nearest vector (ties: lowest id); (-1, -inf) when empty. Exact in every mode."""
        candidates = None
        if self._ready() and not self._is_tree:
            _, scores = self._searcher.search(query, final_num_neighbors=1)
            candidates = self._candidates(query, float(scores[0]))
        if candidates is None:
            self.fallbacks += 1
            return self._exact.nearest(query)
        self.certified += 1
        return best(np.array(candidates, np.int64), exact_cosines(self._exact.vectors(candidates), query))

    def _candidates(self, query: Float32[np.ndarray, " D"], threshold: float) -> list[int] | None:
        """Ids of every neighbor that may be above the threshold, or None where that cannot be certified."""
        size, floor, count = len(self), threshold - ROUNDING_MARGIN, _FIRST_NEIGHBORS
        while True:
            ids, scores = self._searcher.search(query, final_num_neighbors=min(count, size))
            complete = len(ids) == size or (len(ids) > 0 and scores[-1] <= floor)
            if complete:
                return [int(item) for item, score in zip(ids, scores, strict=True) if score > floor]
            if len(ids) < min(count, size) or count * _GROWTH > size * _LARGEST_SHARE:
                return None
            count *= _GROWTH

    def _audit(
        self, hits: Int64[np.ndarray, " hits"], truth: Int64[np.ndarray, " truth"]
    ) -> Int64[np.ndarray, " truth"]:
        self.audits += 1
        self.missed += len(truth) - len(hits)
        return truth

    def _ready(self) -> bool:
        """Whether a searcher of the right kind holds the current vectors; builds it if there are enough."""
        size = len(self)
        if size < max(self._exact_below, 1):
            self._searcher = None
            return False
        tree = self._tree_above is not None and size > self._tree_above
        if self._searcher is None or tree != self._is_tree or (tree and size > 2 * self._built_size):
            self._build(tree)
        return True

    def _build(self, tree: bool) -> None:
        ids, vectors = self._exact.items()
        builder = self._scann.scann_ops_pybind.builder(vectors, _FIRST_NEIGHBORS, "dot_product")
        if tree:
            leaves = max(1, round(len(ids) ** 0.5))
            builder = builder.tree(leaves, max(1, leaves // 5), training_sample_size=min(len(ids), 100_000))
        with _native_log_filter():
            self._searcher = builder.score_brute_force().build(docids=[str(item) for item in ids])
        self._is_tree, self._built_size = tree, len(ids)


def _load_scann() -> ModuleType:
    try:
        import scann
    except ImportError as error:
        raise ConfigError(
            f"memory.index = 'scann' needs the package scann, which exists for Linux only (here: {sys.platform}); "
            "use memory.index = 'exact', which gives the same answers"
        ) from error
    return scann


@contextmanager
def _native_log_filter() -> Generator[None, None, None]:
    """Drop the information and warning lines that ScaNN's native code writes to descriptor 2; pass on all others."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            captured.seek(0)
            kept = [line for line in captured if not line.startswith((b"I0", b"I1", b"W0", b"W1", b"WARNING: All log"))]
            sys.stderr.write(b"".join(kept).decode(errors="replace"))
