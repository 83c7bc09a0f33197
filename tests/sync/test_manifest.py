"""A manifest reads back as it was, and any change to it is noticed."""

import dataclasses
import json
from pathlib import Path

import pytest

from empo2_jax.errors import SyncError
from empo2_jax.sync.manifest import FileEntry, Manifest, Parent, TensorEntry, latest, read_manifest, versions

SHARD = "model-00001-of-00001.safetensors"
MANIFEST = Manifest(
    version=4,
    parent=Parent(3, "ab" * 32),
    kind="full",
    dtype="bfloat16",
    tensors={"b": TensorEntry(SHARD, (2, 3), "1"), "a": TensorEntry(SHARD, (5,), "2")},
    files={SHARD: FileEntry(100, "3")},
)


def test_round_trip_keeps_the_order_of_tensors(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    found = read_manifest(tmp_path)
    assert found == MANIFEST
    assert list(found.tensors) == ["b", "a"]
    assert found.seal == MANIFEST.seal
    start = len(found.shard(SHARD).header)
    assert found.shard(SHARD).spans == {"b": (start, start + 12), "a": (start + 12, start + 22)}


def test_every_field_enters_the_seal() -> None:
    others = [
        dataclasses.replace(MANIFEST, version=5),
        dataclasses.replace(MANIFEST, parent=None),
        dataclasses.replace(MANIFEST, parent=Parent(3, "cd" * 32)),
        dataclasses.replace(MANIFEST, kind="delta"),
        dataclasses.replace(MANIFEST, dtype="float32"),
        dataclasses.replace(MANIFEST, tensors={}),
        dataclasses.replace(MANIFEST, files={SHARD: FileEntry(101, "3")}),
    ]
    assert len({other.seal for other in [MANIFEST, *others]}) == 8


def test_only_a_delta_is_chained() -> None:
    assert MANIFEST.chained_to is None
    assert dataclasses.replace(MANIFEST, kind="delta").chained_to == Parent(3, "ab" * 32)
    assert MANIFEST.reference == Parent(4, MANIFEST.seal)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 5}, "checksum does not match"),
        ({"format": 2}, "format 2, this version reads 1"),
        ({"files": {SHARD: {"size": 1}}}, "not a manifest of this format"),
        ({"tensors": []}, "not a manifest of this format"),
    ],
)
def test_a_changed_manifest_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    MANIFEST.write(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SyncError, match=message):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", "3", "{"])
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(SyncError, match=r"manifest\.json: not a manifest"):
        read_manifest(tmp_path)


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"manifest\.json: No such file or directory; a published version has"):
        read_manifest(tmp_path)


def test_unknown_kind_is_refused(tmp_path: Path) -> None:
    dataclasses.replace(MANIFEST, kind="half").write(tmp_path)
    with pytest.raises(SyncError, match="kind 'half'"):
        read_manifest(tmp_path)


def test_versions_are_the_numbered_folders_with_a_manifest(tmp_path: Path) -> None:
    assert versions(tmp_path / "none") == []
    assert latest(tmp_path) is None
    for name in ("10", "9", ".draft-1-2", "notes"):
        (tmp_path / name).mkdir()
        MANIFEST.write(tmp_path / name)
    (tmp_path / "11").mkdir()
    assert versions(tmp_path) == [9, 10]
    assert latest(tmp_path) == tmp_path / "10"
