"""The shapes of Qwen2.5-Instruct from 0.5B to 72B, so that a run can be planned without weights or a network.

The numbers are those of the public `config.json` files; every head has 64 or 128 elements.
"""

import re

from empo2_jax.models.qwen2_config import Qwen2Config


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=mlp,
        rope_theta=1_000_000.0,
        tie_embeddings=tied,
    )


QWEN2_5: dict[str, Qwen2Config] = {
    "0.5B": _shape(24, 896, 14, 2, 4_864, 151_936, True),
    "1.5B": _shape(28, 1_536, 12, 2, 8_960, 151_936, True),
    "3B": _shape(36, 2_048, 16, 2, 11_008, 151_936, True),
    "7B": _shape(28, 3_584, 28, 4, 18_944, 152_064, False),
    "14B": _shape(48, 5_120, 40, 8, 13_824, 152_064, False),
    "32B": _shape(64, 5_120, 40, 8, 27_648, 152_064, False),
    "72B": _shape(80, 8_192, 64, 8, 29_568, 152_064, False),
}


def size_in(path: str) -> str | None:
    """The size that a hub id or a folder's name speaks of, such as `7B` in `Qwen/Qwen2.5-7B-Instruct`."""
    found = re.search(r"qwen2\.5-(\d+(?:\.\d+)?b)(?![a-z0-9])", path.lower())
    size = found[1].upper() if found else ""
    return size if size in QWEN2_5 else None
