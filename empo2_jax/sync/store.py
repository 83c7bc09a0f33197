"""The folder of published versions as its one writer sees it: drafts, hard links, one rename, deletion.

A version is written as a hidden draft and appears by a rename. A shard whose tensors did not change is a hard link to
the parent's. Old versions go when neither `keep`, a chain of deltas nor a reader's lease holds them. Several processes
write one draft on a shared filesystem: each its own files, the first one the rest. Where tensors come from is
`orbax_publish.py`; nothing here knows JAX.
"""

import fcntl
import filecmp
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from empo2_jax.checkpoint_files import sync, sync_tree
from empo2_jax.errors import GUIDE, SyncError
from empo2_jax.sync.bundle import unread
from empo2_jax.sync.delta import encode
from empo2_jax.sync.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    latest,
    read_manifest,
    versions,
)
from empo2_jax.sync.tensor_file import (
    Tensor,
    checksums,
    layout,
    same_bytes,
    shard_checksum,
    spread,
    whole_checksum,
    write_tensors,
)

_log = logging.getLogger(__name__)
_POLL_S = 0.02


@dataclass
class Part:
    """What one process wrote of a version."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)

    def merge(self, other: "Part") -> None:
        """Take over the entries of `other`."""
        self.tensors |= other.tensors
        self.files |= other.files


class VersionStore:
    """One root folder of versions, locked for one writer (which may be several processes of one run)."""

    def __init__(self, root: Path, *, keep: int, durable: bool, process: int, processes: int, timeout_s: float) -> None:
        """Take the lock and remove what an earlier writer left half done (the first process does both).

        Raises:
            SyncError: another run writes here, or the folder cannot be written.
        """
        self.root = root
        self._keep, self._durable, self._timeout_s = keep, durable, timeout_s
        self._process, self._processes = process, processes
        self._flusher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush")
        self._flushing: list[Future[None]] = []  # files of this draft on their way to the disk
        if process == 0:
            try:
                root.mkdir(parents=True, exist_ok=True)
                self._lock = (root / ".writer").open("a")
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._sweep(".draft-*", ".old-*", ".aside-*")
            except BlockingIOError:
                self._lock.close()
                raise SyncError(f"{root}: another process publishes here") from None
            except OSError as error:
                raise SyncError(f"{root}: cannot be written: {error.strerror}") from error
        self.parent: Manifest | None = None
        self.reread_parent()

    def close(self) -> None:
        """Release the lock."""
        self._flusher.shutdown()
        if self._process == 0:
            self._lock.close()

    def begin(self, draft: Path, version: int) -> None:
        """Make an empty draft; what TensorStore's threads made of a failed one since its removal goes.

        Raises:
            SyncError: a version of this or a higher number is there.
            OSError: the folder cannot be written.
        """
        if (numbers := versions(self.root)) and version <= numbers[-1]:
            raise SyncError(f"{self.root}: version {version} after {numbers[-1]}; published versions never go back")
        self._flushing = []
        draft.mkdir(exist_ok=True)
        if self._process == 0:
            for late in set(self.root.glob(".draft-*")) - {draft}:
                shutil.rmtree(late, ignore_errors=True)

    def discard(self, draft: Path, reason: str) -> None:
        """Give a draft up: the first process removes it, another one tells the first process why."""
        if self._process == 0:
            shutil.rmtree(draft, ignore_errors=True)
        else:
            _write_json(draft / f".part-{self._process}", {"error": reason})

    def write_shard(self, draft: Path, file: str, tensors: Mapping[str, Tensor], dtype: str) -> Part:
        """Write, or link from the parent, one safetensors file of a full version."""
        sums = checksums(tensors)
        plan = layout({name: tensor.shape for name, tensor in tensors.items()}, dtype)
        entry = FileEntry(plan.size, shard_checksum(plan.header, sums.values()))
        if not self._link(draft, file, entry, lambda path: same_bytes(path, plan, tensors)):
            write_tensors(draft / file, plan, tensors)
            if self._durable:  # the disk works while the next file is made
                self._flushing.append(self._flusher.submit(sync, draft / file))
        return Part({name: TensorEntry(file, tensors[name].shape, sums[name]) for name in tensors}, {file: entry})

    def write_delta(self, draft: Path, file: str, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Part:
        """Write what changed in the tensors of `new` since `old`."""
        sums = checksums(new)
        changes = spread(encode, new, (old[name] for name in new), new.values())
        parts = {key: part for change in changes for key, part in change.items()}
        plan = layout({key: part.shape for key, part in parts.items()}, "uint8")
        write_tensors(draft / file, plan, parts)
        entry = FileEntry(plan.size, whole_checksum(draft / file))
        return Part({name: TensorEntry(file, new[name].shape, sums[name]) for name in new}, {file: entry})

    def copy(self, draft: Path, source: Path) -> None:
        """Put a file of another folder into a draft, as a hard link to the parent's if that has the same bytes."""
        entry = FileEntry(source.stat().st_size, whole_checksum(source))
        if not self._link(draft, source.name, entry, lambda path: filecmp.cmp(path, source, shallow=False)):
            shutil.copyfile(source, draft / source.name)

    def commit(self, draft: Path, part: Part, *, names: Sequence[str], version: int, kind: str, dtype: str) -> Path:
        """Turn a draft into a version. Of several processes the first does it when all have written their part.

        Args:
            draft: What `begin` made.
            part: What this process wrote.
            names: All tensors, in the order of the model.
            version: Its number.
            kind: full or delta.
            dtype: That of the tensors.

        Raises:
            SyncError: another process failed or did not finish in time.
            OSError: the disk does not take it.
        """
        final = self.root / str(version)
        for file in self._flushing:
            file.result()
        if self._process:
            _write_json(draft / f".part-{self._process}", asdict(part))
            self._await(final.is_dir, draft.is_dir, f"{final}: the first process did not finish the version")
        else:
            self._gather(draft, part)
            files = {path.relative_to(draft).as_posix(): path for path in sorted(draft.rglob("*")) if path.is_file()}
            part.files |= {
                name: FileEntry(path.stat().st_size, whole_checksum(path))
                for name, path in files.items()
                if name not in part.files
            }
            parent = None if self.parent is None else self.parent.reference
            tensors = {name: part.tensors[name] for name in names}
            Manifest(version, parent, kind, dtype, tensors, dict(sorted(part.files.items()))).write(draft)
            if self._durable:
                sync_tree(draft)
            draft.rename(final)
            if self._durable:
                sync(self.root)
            self._drop_old()
        self.parent = read_manifest(final)
        return final

    def set_aside_from(self, version: int) -> None:
        """Take this version and all newer ones out of the row; leased ones stay readable as `.aside-<version>`."""
        if self._process == 0:
            for number in reversed([number for number in versions(self.root) if number >= version]):
                (self.root / str(number)).rename(self.root / f".aside-{number}-{time.time_ns()}")
            self._sweep(".aside-*")
        self.reread_parent()

    def reread_parent(self) -> None:
        """Take the newest version that is there as the parent of the next."""
        newest = latest(self.root)
        self.parent = None if newest is None else read_manifest(newest)

    def _link(self, draft: Path, file: str, entry: FileEntry, is_same: Callable[[Path], bool]) -> bool:
        """Hard link the parent's file if it has the same content; a filesystem without links is no error."""
        if self.parent is None or self.parent.files.get(file) != entry:
            return False
        path = self.root / str(self.parent.version) / file
        try:
            if not is_same(path):  # damaged since
                return False
            os.link(path, draft / file)
        except OSError:
            return False
        return True

    def _gather(self, draft: Path, part: Part) -> None:
        for process in range(1, self._processes):
            path = draft / f".part-{process}"
            self._await(path.is_file, draft.is_dir, f"{draft}: process {process} did not write its part")
            part.merge(_read_part(path))
            path.unlink()

    def _await(self, done: Callable[[], bool], possible: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise SyncError(f"{complaint} within {self._timeout_s:g} s")
            if not possible() and not done():
                raise SyncError(complaint)
            time.sleep(_POLL_S)

    def _drop_old(self) -> None:
        try:
            numbers = versions(self.root)
            needed = set(numbers[-self._keep :])
            for number in reversed(numbers):
                folder = self.root / str(number)
                with unread(folder) as free:
                    if number in needed or not free:
                        link = read_manifest(folder).chained_to
                        needed |= {link.version} if link else set()
                    else:
                        folder.rename(self.root / f".old-{number}")
            self._sweep(".old-*", ".aside-*")
        except (OSError, SyncError) as error:  # the new version is there and whole
            _log.warning("%s: old versions were not removed: %s; %sold-weights-that-stay", self.root, error, GUIDE)

    def _sweep(self, *patterns: str) -> None:
        for path in (path for pattern in patterns for path in self.root.glob(pattern)):
            if path.name.startswith(".aside-"):
                with unread(path) as free:
                    if not free:
                        continue
            shutil.rmtree(path)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """In one piece, as another process waits for it; nobody waits for a draft that is gone."""
    hidden = path.with_suffix(".tmp")
    with suppress(FileNotFoundError):
        hidden.write_text(json.dumps(content), encoding="utf-8")
        hidden.rename(path)


def _read_part(path: Path) -> Part:
    content = json.loads(path.read_text(encoding="utf-8"))
    if "error" in content:
        raise SyncError(f"process {path.name.removeprefix('.part-')}: {content['error']}")
    tensors = {
        name: TensorEntry(entry["file"], tuple(entry["shape"]), entry["checksum"])
        for name, entry in content["tensors"].items()
    }
    return Part(tensors, {name: FileEntry(**entry) for name, entry in content["files"].items()})
