"""Hashed bags of words and word pairs: a fixed embedder without weights, for tests and the toy world.

Texts that share words are near each other; it knows no synonyms. Not the paper's embedder (see minilm_embedder.py).
"""

import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Float32

_WORD = re.compile(r"\w+")


class HashingEmbedder:
    """`Embedder` of signed feature hashing over lower-case unigrams and bigrams."""

    def __init__(self, dimension: int = 384) -> None:
        """Vectors of `dimension` floats."""
        self.dimension = dimension

    def embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "K D"]:
        """Unit-norm rows; a text without words gives the first axis."""
        rows = [self._row(text) for text in texts]
        return np.stack(rows) if rows else np.zeros((0, self.dimension), np.float32)

    def _row(self, text: str) -> Float32[np.ndarray, " D"]:
        words = _WORD.findall(text.lower())
        counts = np.zeros(self.dimension)
        for feature in [*words, *(f"{left} {right}" for left, right in pairwise(words))]:
            value = int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "little")
            counts[(value >> 1) % self.dimension] += 1.0 if value & 1 else -1.0
        norm = np.linalg.norm(counts)
        if norm == 0:  # no words, or all of them cancel
            return np.eye(1, self.dimension, dtype=np.float32)[0]
        return (counts / norm).astype(np.float32)
