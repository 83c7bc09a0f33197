"""Where the cache is, and that all that is kept in it is found by one function."""

from pathlib import Path

import pytest

from empo2_jax.cache import cache_folder

PACKAGE = Path(__file__).parents[1] / "empo2_jax"


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPO2_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert cache_folder("webshop", "hashes") == tmp_path / "webshop/hashes"
    for unset in (lambda: monkeypatch.setenv("EMPO2_CACHE", ""), lambda: monkeypatch.delenv("EMPO2_CACHE")):
        unset()
        assert cache_folder() == Path.home() / ".cache" / "empo2_jax"


def test_nothing_else_looks_for_it() -> None:
    found = [path.name for path in PACKAGE.rglob("*.py") if 'environ.get("EMPO2_CACHE")' in path.read_text("utf-8")]
    assert found == ["cache.py"]
