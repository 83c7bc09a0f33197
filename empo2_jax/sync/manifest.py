"""The manifest of one published version, and the folder that holds the versions.

`<root>/<version>/manifest.json` lists every file with its size and checksum and every tensor with its file, shape and
checksum, and names its parent by version and seal. A seal is the SHA-256 of the manifest, so that a chain of deltas
belongs to exactly one start. Whether files are what the manifest says is checked in `bundle.py`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from empo2_jax.errors import SyncError
from empo2_jax.readers import parse_json
from empo2_jax.sync.tensor_file import DTYPES, Layout, layout

VERSIONS_KEPT = 3  # for servers: one may still read the version before the last
MANIFEST = "manifest.json"
FORMAT = 1
KINDS = ("full", "delta")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the version; in a delta the checksum is that of the result."""

    file: str
    shape: tuple[int, ...]
    checksum: str


@dataclass(frozen=True)
class FileEntry:
    """One file by its path below the version's folder; `size` in bytes."""

    size: int
    checksum: str


@dataclass(frozen=True)
class Parent:
    """The version that came before, and its seal."""

    version: int
    seal: str


@dataclass(frozen=True)
class Manifest:
    """What one version consists of; `kind` is full or delta, `dtype` float32 or bfloat16."""

    version: int
    parent: Parent | None
    kind: str
    dtype: str
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]

    @property
    def seal(self) -> str:
        """SHA-256 over all fields."""
        return hashlib.sha256(json.dumps(self._fields(), sort_keys=True).encode()).hexdigest()

    @property
    def chained_to(self) -> Parent | None:
        """The parent that a delta needs; None of a full version."""
        return self.parent if self.kind == "delta" else None

    @property
    def reference(self) -> Parent:
        """How a child names this version."""
        return Parent(self.version, self.seal)

    def shard(self, file: str) -> Layout:
        """Layout of a safetensors file of a full version."""
        shapes = {name: entry.shape for name, entry in self.tensors.items() if entry.file == file}
        return layout(shapes, self.dtype)

    def write(self, folder: Path) -> None:
        """Write `manifest.json`."""
        text = json.dumps({**self._fields(), "seal": self.seal}, indent=1) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")

    def _fields(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def read_manifest(folder: Path) -> Manifest:
    """Parse the manifest of a version.

    Raises:
        SyncError: there is none, it cannot be read, or it was changed after it was written.
    """
    path = folder / MANIFEST
    try:
        content = parse_json(path.read_bytes(), dict[str, Any], f"{path}: not a manifest of this format", SyncError)
        if content["format"] != FORMAT:
            raise SyncError(f"{path}: format {content['format']!r}, this version reads {FORMAT}")
        parent = content["parent"]
        manifest = Manifest(
            version=content["version"],
            parent=None if parent is None else Parent(**parent),
            kind=content["kind"],
            dtype=content["dtype"],
            tensors={
                name: TensorEntry(entry["file"], tuple(entry["shape"]), entry["checksum"])
                for name, entry in content["tensors"].items()
            },
            files={name: FileEntry(**entry) for name, entry in content["files"].items()},
        )
        seal = content["seal"]
    except OSError as error:
        raise SyncError(f"{path}: {error.strerror}; a published version has a manifest") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SyncError(f"{path}: not a manifest of this format: {error}") from error
    if seal != manifest.seal:
        raise SyncError(f"{path}: checksum does not match")
    if manifest.kind not in KINDS or manifest.dtype not in DTYPES:
        raise SyncError(
            f"{path}: kind {manifest.kind!r} and dtype {manifest.dtype!r}; {KINDS} and {list(DTYPES)} exist"
        )
    return manifest


def versions(root: Path) -> list[int]:
    """Published versions, ascending; not verified."""
    if not root.is_dir():
        return []
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal() and (path / MANIFEST).is_file())


def latest(root: Path) -> Path | None:
    """Folder of the newest version, None if there is none. It may be a delta; its files are not verified."""
    numbers = versions(root)
    return root / str(numbers[-1]) if numbers else None
