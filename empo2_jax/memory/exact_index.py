"""The reference index: one matrix of unit vectors, scanned for every query.

At the paper's capacity of 1,000 entries a scan takes some hundredths of a millisecond, so this is a product
choice and not only the oracle of the tests. It is no approximate index. `best_first` keeps the rows in score order and
scans them in growing blocks, so that the few best hits of a large memory are found at its top.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float32, Float64, Int64

# Matrix products round a row differently at different positions; candidates within this margin are scored again.
ROUNDING_MARGIN = 1e-4
_FIRST_BLOCK = 256  # rows of the first block of `best_first`; each next one is twice as large


def exact_cosines(vectors: Float32[np.ndarray, "K D"], query: Float32[np.ndarray, " D"]) -> Float64[np.ndarray, " K"]:
    """Dot products in float64, each a function of its own row only: no dependence on position or neighbors."""
    return (vectors.astype(np.float64) * query.astype(np.float64)).sum(axis=1)


class ExactIndex:
    """`VectorIndex` over a matrix that doubles when full; a removed row is filled with the last one.

    Answers depend on the current entries alone, never on the order of insertions and removals.
    """

    def __init__(self, dimension: int, capacity: int = 64) -> None:
        """Empty index for vectors of `dimension` floats, with room for `capacity` rows before the first doubling."""
        self._matrix = np.zeros((capacity, dimension), np.float32)
        self._ids = np.zeros(capacity, np.int64)
        self._scores = np.zeros(capacity)
        self._row: dict[int, int] = {}
        self._ranked = True  # rows lie by score and id, both descending

    def __len__(self) -> int:
        """Number of vectors."""
        return len(self._row)

    def add(
        self, ids: Sequence[int], vectors: Float32[np.ndarray, "K D"], scores: Sequence[float] | None = None
    ) -> None:
        """Insert; raises `ValueError`, and changes nothing, if an id is repeated or already present."""
        if len(ids) != len(vectors) or len(set(ids)) != len(ids) or not self._row.keys().isdisjoint(ids):
            raise ValueError(f"add: {len(ids)} ids for {len(vectors)} vectors, and every id must be new")
        start, end = len(self._row), len(self._row) + len(ids)
        self._grow(end)
        self._matrix[start:end] = vectors
        self._ids[start:end] = ids
        self._scores[start:end] = 0.0 if scores is None else scores
        self._row.update(zip(ids, range(start, end), strict=True))
        self._ranked = False

    def remove(self, ids: Sequence[int]) -> None:
        """Delete; raises `KeyError` at the first id that is not present."""
        for item in ids:
            row = self._row.pop(item)
            last = len(self._row)
            if row != last:
                self._matrix[row] = self._matrix[last]
                self._ids[row], self._scores[row] = self._ids[last], self._scores[last]
                self._row[int(self._ids[last])] = row
                self._ranked = False

    def above(self, query: Float32[np.ndarray, " D"], threshold: float) -> Int64[np.ndarray, " hits"]:
        """Ids of all vectors with cosine strictly > threshold, ascending."""
        rows = np.flatnonzero(self._coarse(query) > threshold - ROUNDING_MARGIN)
        hits = rows[exact_cosines(self._matrix[rows], query) > threshold]
        return np.sort(self._ids[hits])

    def best_first(self, query: Float32[np.ndarray, " D"], threshold: float) -> Iterator[int]:
        """The ids of `above` by score descending (ties: highest id), one by one: who stops early saves the rest."""
        self._rank()
        start, block, size = 0, _FIRST_BLOCK, len(self._row)
        while start < size:
            part = self._matrix[start : min(start + block, size)]
            coarse = part @ query
            for row in np.flatnonzero(coarse > threshold - ROUNDING_MARGIN).tolist():
                certain = coarse[row] > threshold + ROUNDING_MARGIN
                if certain or exact_cosines(part[row : row + 1], query)[0] > threshold:
                    yield int(self._ids[start + row])
            start, block = start + block, 2 * block

    def nearest(self, query: Float32[np.ndarray, " D"]) -> tuple[int, float]:
        """Id and cosine of the nearest vector (ties: lowest id); (-1, -inf) when empty."""
        if not self._row:
            return -1, -np.inf
        coarse = self._coarse(query)
        rows = np.flatnonzero(coarse >= coarse.max() - ROUNDING_MARGIN)
        return best(self._ids[rows], exact_cosines(self._matrix[rows], query))

    def vectors(self, ids: Sequence[int]) -> Float32[np.ndarray, "K D"]:
        """The stored vectors of `ids`, in that order."""
        return self._matrix[[self._row[item] for item in ids]]

    def scores(self, ids: Sequence[int]) -> Float64[np.ndarray, " K"]:
        """The scores of `ids`, in that order."""
        return self._scores[[self._row[item] for item in ids]]

    def items(self) -> tuple[list[int], Float32[np.ndarray, "N D"]]:
        """All ids and vectors (a copy), in storage order."""
        size = len(self._row)
        return self._ids[:size].tolist(), self._matrix[:size].copy()

    def _coarse(self, query: Float32[np.ndarray, " D"]) -> Float32[np.ndarray, " N"]:
        return self._matrix[: len(self._row)] @ query

    def _rank(self) -> None:
        """Put the rows into score order, once after a change."""
        if self._ranked:
            return
        size = len(self._row)
        order = np.lexsort((-self._ids[:size], -self._scores[:size]))
        for array in (self._matrix, self._ids, self._scores):
            array[:size] = array[order]
        self._row = {item: row for row, item in enumerate(self._ids[:size].tolist())}
        self._ranked = True

    def _grow(self, needed: int) -> None:
        capacity = len(self._ids)
        if needed > capacity:
            extra = max(needed, 2 * capacity) - capacity
            self._matrix = np.concatenate([self._matrix, np.zeros((extra, self._matrix.shape[1]), np.float32)])
            self._ids = np.concatenate([self._ids, np.zeros(extra, np.int64)])
            self._scores = np.concatenate([self._scores, np.zeros(extra)])


def best(ids: Int64[np.ndarray, " K"], cosines: Float64[np.ndarray, " K"]) -> tuple[int, float]:
    """The id with the largest cosine, the lowest such id on ties. At least one candidate."""
    top = cosines.max()
    return int(ids[cosines == top].min()), float(top)
