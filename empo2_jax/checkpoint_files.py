"""The files of one checkpoint: its manifest with checksums, what is wrong with them, which steps stay, the disk.

`manifest.json` lists every file with its SHA-256 and is sealed by a checksum of its own. It names its format: one that
this version does not know is refused, never skipped and never read half. What is in the files is `checkpoint.py`'s.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from empo2_jax.errors import CheckpointError
from empo2_jax.readers import parse_json

FORMAT = 1
MANIFEST = "manifest.json"


def kept_steps(steps: Sequence[int], scores: Mapping[int, float], last: int, every: int, best: int) -> set[int]:
    """Steps that stay: the `last` newest, those that `every` divides (0: none), the `best` by score (ties: newer).

    Args:
        steps: Ascending.
        scores: Of the steps that have one.
        last: At least 1.
        every: In iterations.
        best: How many.
    """
    ranked = sorted((step for step in steps if step in scores), key=lambda step: (scores[step], step))
    periodic = {step for step in steps if every and step % every == 0}
    return set(steps[-last:]) | periodic | set(ranked[len(ranked) - min(best, len(ranked)) :])


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of all files in `folder`, with `facts` beside their checksums."""
    files = {str(path.relative_to(folder)): _hash_file(path) for path in _files(folder)}
    manifest = {"format": FORMAT, **facts, "files": files}
    write_json(folder / MANIFEST, {**manifest, "seal": _seal(manifest)})


def format_problem(folder: Path) -> str | None:
    """What to say of a step that another version of this package wrote; None if it is ours or not readable at all."""
    try:
        found = read_object(folder / MANIFEST).get("format")
    except (OSError, CheckpointError):
        return None
    if not isinstance(found, int) or found == FORMAT:
        return None
    return (
        f"format {found}, this version reads {FORMAT}; use the version of empo2_jax that wrote it (run.json names it)"
    )


def files_problem(folder: Path) -> str | None:
    """What is wrong with a step's files, None if they are what was written."""
    try:
        manifest = read_object(folder / MANIFEST)
        foreign = format_problem(folder)
        if foreign is not None:
            return f"{MANIFEST}: {foreign}"
        if manifest.get("seal") != _seal(manifest):
            return f"{MANIFEST}: checksum does not match"
        listed: dict[str, str] = manifest["files"]
        present = {str(path.relative_to(folder)) for path in _files(folder)} - {MANIFEST}
        for name in sorted(listed.keys() ^ present):
            return f"{name}: {'missing' if name in listed else 'not in the manifest'}"
        for name, digest in listed.items():
            if _hash_file(folder / name) != digest:
                return f"{name}: checksum does not match"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except CheckpointError as error:
        return str(error)
    return None


def hash_folder(folder: Path) -> str:
    """SHA-256 over names and contents of all files below a folder."""
    return hashlib.sha256(canonical({str(p.relative_to(folder)): _hash_file(p) for p in _files(folder)})).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def canonical(value: Any) -> bytes:
    """JSON that is equal for equal values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(canonical({key: value for key, value in manifest.items() if key != "seal"})).hexdigest()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object for people to read."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_object(path: Path, shape: Any = dict[str, Any]) -> dict[str, Any]:
    """The JSON object in a file, of `shape`; raises `CheckpointError` if it is none, `OSError` if it is not there."""
    return parse_json(path.read_bytes(), shape, path.name, CheckpointError)


def require_space(path: Path, size: int) -> None:
    """Allocate `size` bytes and give them back: quotas and limits count, and Orbax fails only with tracebacks.

    Raises:
        OSError: the disk, a quota or a limit does not allow it.
    """
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise OSError(f"needs {size / 2**20:.1f} MiB: {error.strerror}") from error
        finally:
            path.unlink()


def check_writable(folder: Path) -> None:
    """Raise `CheckpointError` if a folder cannot be made, or not written where it is there. Nothing is left behind."""
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=place):
            pass
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from None


def sync_tree(folder: Path) -> None:
    """Bring a folder and all below it to the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Bring one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
