"""The user's cache: downloads, gold paths, games, built catalogues and compiled programs; any of it may be deleted."""

import os
from pathlib import Path


def cache_folder(*parts: str) -> Path:
    """`$EMPO2_CACHE`, else `~/.cache/empo2_jax`, and what is below it."""
    return Path(os.environ.get("EMPO2_CACHE") or Path.home() / ".cache" / "empo2_jax").joinpath(*parts)
