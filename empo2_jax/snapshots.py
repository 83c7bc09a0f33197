"""What lies behind a storage URL: objects named by their SHA-256, and sealed snapshots that name them all.

A snapshot is written last, so it is there in full or not at all; what is there already is neither read nor sent again.
Which run directory may send and fetch, and when, is `storage.py`'s.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any

import fsspec
from pydantic import Field

from empo2_jax.checkpoint_files import canonical, read_object
from empo2_jax.errors import CheckpointError, ConfigError, DataError
from empo2_jax.metrics import write_atomically
from empo2_jax.readers import parse_json

KEPT = 2  # snapshots; a reader may be at the one before the last
SETTLED_NS = 2 * 10**9  # a file that changed later than this before it was read may change again unseen
CHUNK = 1 << 22


def check_url(url: str) -> None:
    """Raise `ConfigError` if a URL names no storage, or one that is unknown, or whose client is not installed."""
    protocol, separator, _ = url.partition("://")
    if not separator:
        raise ConfigError(f"storage {url}: a URL with its scheme is allowed: s3://…, gs://…, file://…")
    if protocol not in fsspec.available_protocols():
        raise ConfigError(f"storage {url}: {protocol!r} is unknown; s3, gs and file are common ones")
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise ConfigError(f"storage {url}: {error}") from None


class Checksums:
    """Checksums by name of files that were read: the same size, time of change and inode mean the same content."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[Any]] = {}
        with contextlib.suppress(CheckpointError):  # damaged: all is read again
            self._known = (
                read_object(path, dict[str, Annotated[list[Any], Field(min_length=1)]]) if path.is_file() else {}
            )
        self._now = time.time_ns()

    def get(self, name: str, stat: os.stat_result) -> str | None:
        """The checksum of a file, None if it has to be read."""
        digest, *state = self._known.get(name, [None])
        return digest if state == _state_of(stat) else None

    def put(self, name: str, before: os.stat_result, after: os.stat_result, digest: str) -> None:
        """Keep a checksum, unless the file changed while it was read or just before."""
        if _state_of(before) == _state_of(after) and before.st_mtime_ns < self._now - SETTLED_NS:
            self._known[name] = [digest, *_state_of(before)]

    def save(self, names: Set[str]) -> None:
        """Write those of `names`; others are gone."""
        kept = {name: known for name, known in self._known.items() if name in names}
        write_atomically(self._path, json.dumps(kept) + "\n")


def _state_of(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


class Storage:
    """The two folders behind a URL."""

    def __init__(self, url: str) -> None:
        check_url(url)
        self._fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
        self._url, self._objects, self._snapshots = url, f"{root}/objects", f"{root}/snapshots"

    def newest(self) -> dict[str, Any] | None:
        """The newest whole snapshot."""
        names = sorted(self._sizes(self._snapshots), reverse=True)
        return next((found for name in names if (found := self._snapshot(name)) is not None), None)

    def _snapshot(self, name: str) -> dict[str, Any] | None:
        """A snapshot, None if it is not whole: some storages have no atomic writes."""
        try:
            snapshot = parse_json(self._fs.cat_file(f"{self._snapshots}/{name}"), dict[str, Any], name)
        except DataError:
            return None
        return snapshot if snapshot.pop("seal", None) == _seal(snapshot) else None

    def send(self, files: Mapping[str, tuple[Path, os.stat_result]], read: Checksums) -> dict[str, list[Any]]:
        """Send what is not there; returns checksum and size of every file. What `read` knows is not read."""
        there, sent = self._sizes(self._objects), {}
        self._fs.makedirs(self._objects, exist_ok=True)
        for name, (path, stat) in files.items():
            digest, found = read.get(name, stat), stat.st_size
            if digest is None or there.get(digest) != found:
                with path.open("rb") as file:
                    digest, found = self._send(file, stat.st_size, there)
                read.put(name, stat, path.stat(), digest)
            there[digest] = found
            sent[name] = [digest, found]
        return sent

    def _send(self, file: IO[bytes], size: int, there: Mapping[str, int]) -> tuple[str, int]:
        """Send the first `size` bytes of a file, again if it was cut or rewritten meanwhile (logs, databases)."""
        while True:
            digest, found = _digest(_parts(file, size))
            if there.get(digest) == found:
                return digest, found
            with self._fs.open(f"{self._objects}/{digest}", "wb") as target:
                written = _digest(_written(_parts(file, size), target))
            if written == (digest, found):
                return written
            self._fs.rm_file(f"{self._objects}/{digest}")

    def commit(self, snapshot: dict[str, Any]) -> None:
        """Write the snapshot itself: from now on it is the newest."""
        self._fs.makedirs(self._snapshots, exist_ok=True)
        text = json.dumps(snapshot | {"seal": _seal(snapshot)}, ensure_ascii=False)
        self._fs.pipe_file(f"{self._snapshots}/{snapshot['number']:09d}.json", text.encode())

    def drop_old(self) -> None:
        """Remove old snapshots, then the objects that no other one names."""
        names = sorted(self._sizes(self._snapshots))
        for name in names[:-KEPT]:
            self._fs.rm_file(f"{self._snapshots}/{name}")
        kept = [snapshot for name in names[-KEPT:] if (snapshot := self._snapshot(name)) is not None]
        used = {digest for snapshot in kept for digest, _ in snapshot["files"].values()}
        for digest in self._sizes(self._objects).keys() - used:
            self._fs.rm_file(f"{self._objects}/{digest}")

    def receive(self, files: Mapping[str, Any], folder: Path) -> None:
        """Write all files of a snapshot below `folder`."""
        for name, (digest, size) in files.items():
            relative = PurePosixPath(name)
            if relative.is_absolute() or ".." in relative.parts or not relative.parts:
                raise CheckpointError(f"{self._url}: {name!r} is no path inside a run directory")
            path = folder / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._fs.get_file(f"{self._objects}/{digest}", str(path))
            except FileNotFoundError:
                raise CheckpointError(f"{self._url}: {name}: its object is missing") from None
            with path.open("rb") as file:
                if path.stat().st_size != size or _digest(_parts(file, size)) != (digest, size):
                    raise CheckpointError(f"{self._url}: {name}: checksum does not match")

    def _sizes(self, folder: str) -> dict[str, int]:
        """Sizes of the files in a folder by name."""
        try:
            entries = self._fs.ls(folder, detail=True, refresh=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries if entry["type"] == "file"}


def _seal(snapshot: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(snapshot)).hexdigest()


def _parts(file: IO[bytes], size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file in pieces, or all of a shorter one."""
    file.seek(0)
    while size > 0 and (part := file.read(min(CHUNK, size))):
        size -= len(part)
        yield part


def _written(parts: Iterable[bytes], target: IO[bytes]) -> Iterator[bytes]:
    """The parts, each once it was written."""
    for part in parts:
        target.write(part)
        yield part


def _digest(parts: Iterable[bytes]) -> tuple[str, int]:
    """SHA-256 and size in bytes."""
    digest, size = hashlib.sha256(), 0
    for part in parts:
        digest.update(part)
        size += len(part)
    return digest.hexdigest(), size
