"""Published versions as their readers see them: verified before any load, held while in use.

`read_bundle` compares every name, shape, dtype, size and checksum with the manifest and the model's configuration, as
engines take in silence what does not fit. `lease` keeps a version from deletion; the kernel ends the lease of a reader
that dies. Neither needs JAX. What a checksum cannot see, a trainer that wrote wrong weights, is left to a canary.
"""

import fcntl
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from empo2_jax.errors import ConfigError, DataError, SyncError
from empo2_jax.models.qwen2_config import Qwen2Config, read_config
from empo2_jax.models.tensor_names import tensor_shapes
from empo2_jax.sync.manifest import MANIFEST, Manifest, read_manifest
from empo2_jax.sync.tensor_file import (
    Tensor,
    file_checksums,
    read_tensor,
    require_header,
    shard_checksum,
    whole_checksum,
)


@dataclass(frozen=True)
class Bundle:
    """One verified version; a full one is a Hugging Face folder."""

    folder: Path
    manifest: Manifest

    @property
    def version(self) -> int:
        """Its number."""
        return self.manifest.version

    def read(self, name: str) -> Tensor:
        """One tensor of a full version in its stored dtype."""
        entry = self.manifest.tensors[name]
        span = self.manifest.shard(entry.file).spans[name]
        return read_tensor(self.folder / entry.file, span, entry.shape, self.manifest.dtype)


def read_bundle(folder: Path, model_config: Qwen2Config) -> Bundle:
    """Verify one version completely, reading every byte once.

    Args:
        folder: Folder of the version.
        model_config: Architecture that the engine has and the version must fit.

    Raises:
        SyncError: the first thing that is not as it must be: what and where.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    _require_tensors(folder, manifest, model_config)
    try:
        _require_files(folder, manifest)
        _require_config(folder, model_config)
    except OSError as error:
        raise SyncError(f"{error.filename or folder}: {error.strerror}") from error
    return Bundle(folder, manifest)


@contextmanager
def lease(folder: Path) -> Generator[None]:
    """Keep a version from being deleted while the block runs, or until this process dies.

    Many readers may hold one version. The lease is an advisory lock (`flock`) on its manifest; on a network filesystem
    it needs lock support, else only the publisher's `keep` protects the version.

    Raises:
        SyncError: the version is not there (any more).
    """
    path = Path(folder) / MANIFEST
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise SyncError(f"{folder}: no such version: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise SyncError(f"{folder}: the version was deleted")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def unread(folder: Path) -> Generator[bool]:
    """Whether no reader holds the version; then none can take it while the block runs."""
    descriptor = os.open(folder / MANIFEST, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    try:
        yield free
    finally:
        os.close(descriptor)


def _require_tensors(folder: Path, manifest: Manifest, config: Qwen2Config) -> None:
    wanted = tensor_shapes(config)
    found: Mapping[str, tuple[int, ...]] = {name: entry.shape for name, entry in manifest.tensors.items()}
    for name in sorted(wanted.keys() ^ found.keys()):
        where = "is missing" if name in wanted else "is unknown to the model"
        raise SyncError(f"{folder / MANIFEST}: tensor {name} {where}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise SyncError(f"{folder / MANIFEST}: tensor {name} has shape {found[name]}, the model has {shape}")
    if manifest.dtype == "uint8":
        raise SyncError(f"{folder / MANIFEST}: dtype uint8; float32 and bfloat16 are allowed")


def _require_files(folder: Path, manifest: Manifest) -> None:
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    for name in sorted(manifest.files.keys() - present):
        raise SyncError(f"{folder / name}: missing")
    for name in sorted(present - manifest.files.keys() - {MANIFEST}):
        raise SyncError(f"{folder / name}: not in the manifest; an engine would load it")
    shards = {entry.file for entry in manifest.tensors.values()} if manifest.kind == "full" else set()
    for name, entry in manifest.files.items():
        path = folder / name
        if name in shards:
            require_header(path, manifest.shard(name))
        if path.stat().st_size != entry.size:
            raise SyncError(f"{path}: {path.stat().st_size} bytes, the manifest says {entry.size}")
        found = _shard_checksum(path, manifest) if name in shards else whole_checksum(path)
        if found != entry.checksum:
            raise SyncError(f"{path}: checksum does not match the manifest")


def _shard_checksum(path: Path, manifest: Manifest) -> str:
    plan = manifest.shard(path.name)
    found = file_checksums(path, plan.spans)
    for name, checksum in found.items():
        if checksum != manifest.tensors[name].checksum:
            raise SyncError(f"{path}: tensor {name}: checksum does not match the manifest")
    return shard_checksum(plan.header, found.values())


def _require_config(folder: Path, config: Qwen2Config) -> None:
    path = folder / "config.json"
    try:
        found = read_config(folder)
    except (ConfigError, DataError) as error:
        raise SyncError(str(error)) from error
    for key, value in asdict(config).items():
        if asdict(found)[key] != value:
            raise SyncError(f"{path}: {key} is {asdict(found)[key]!r}, the model has {value!r}")
