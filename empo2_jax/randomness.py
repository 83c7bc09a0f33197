"""Counter-based randomness: every draw is a function of (seed, purpose, counters); nothing keeps generator state.

A lost episode can be drawn again alone, and a resumed run repeats nothing and skips nothing.
"""

import hashlib

import numpy as np
from jaxtyping import UInt32


def words(seed: int, purpose: str, *counters: int | str, count: int = 2) -> UInt32[np.ndarray, " count"]:
    """`count` ≤ 16 uniform 32-bit words for one named draw; also the raw key of a JAX threefry generator."""
    text = "/".join([str(seed), purpose, *map(str, counters)])
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=4 * count).digest(), dtype="<u4")


def generator(seed: int, purpose: str, *counters: int | str) -> np.random.Generator:
    """A NumPy generator for one named purpose, for example a shuffle."""
    return np.random.Generator(np.random.Philox(key=int.from_bytes(words(seed, purpose, *counters, count=4).tobytes())))


def uniform(seed: int, purpose: str, *counters: int | str) -> float:
    """One draw in [0, 1)."""
    high, low = (int(word) for word in words(seed, purpose, *counters))
    return ((high << 32 | low) >> 11) * 2.0**-53
