"""The trainer's side: parameters become version N, for engines of any kind, while training goes on.

Values are cast on the device, then leave it shard by shard: shard k + 1 is fetched while shard k is hashed and written.
A version is a Hugging Face folder (safetensors shards with index, config, tokenizer), an Orbax copy for readers that
place each array on a mesh of their own, and a manifest; it appears by one rename (`store.py`). The caller waits for
nothing but the dispatch of the cast; a background thread does the rest, and its error surfaces at the next call.

With several processes every one calls `publish` at the same point and waits for the copies to the host, as gathering
shards is a joint act; each writes its shards and its part of the Orbax copy to the shared folder, the first one the
manifest. Loading is the engines' affair: `bundle.py`, `delta.py`.
"""

import itertools
import math
import secrets
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from empo2_jax.checkpoint_files import require_space
from empo2_jax.errors import SyncError
from empo2_jax.models.hf_folder import INDEX, TOKENIZER_FILES, write_json
from empo2_jax.models.hf_weights import Params, named, with_values
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.tensor_names import tensor_shapes
from empo2_jax.sync.bundle import Bundle
from empo2_jax.sync.store import Part, VersionStore
from empo2_jax.sync.tensor_file import DTYPES, Tensor

ORBAX = "orbax"


class Pending:
    """A version on its way."""

    def __init__(self, version: int, folder: "Future[Path]") -> None:
        """`folder` is what the background thread will return."""
        self.version = version
        self.told = False  # whether the outcome was asked for
        self._folder = folder

    @property
    def done(self) -> bool:
        """Whether it is there, or has failed."""
        return self._folder.done()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Its folder, once it is there.

        Raises:
            SyncError: it could not be written (the version before it stays), or the time is over.
        """
        try:
            self._folder.exception(timeout_s)
        except TimeoutError:
            raise SyncError(f"version {self.version} was not written within {timeout_s:g} s") from None
        self.told = True
        return self._folder.result()


@dataclass(frozen=True)
class _Job:
    """One version as the background thread gets it."""

    version: int
    draft: Path
    is_delta: bool
    shards: dict[str, dict[str, jax.Array | Tensor]]  # this process's, by file name; emptied on the way


class Publisher:
    """Writes the versions of one root folder; a context manager. One per run, in every process of it."""

    def __init__(
        self,
        root: Path,
        config: Qwen2Config,
        *,
        dtype: str = "bfloat16",
        keep: int = 2,
        tokenizer_folder: Path | None = None,
        shards: int = 4,
        orbax: bool = True,
        full_every: int = 1,
        durable: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        """Lock the folder and remove what a killed writer left.

        Args:
            root: Where versions appear, as `<root>/<version>`.
            config: Architecture of the parameters.
            dtype: bfloat16 or float32.
            keep: Newest versions that are never deleted; older ones go when no reader has a lease.
            tokenizer_folder: Folder whose tokenizer files every version gets.
            shards: Safetensors files of a version.
            orbax: Whether full versions have the Orbax copy too, which doubles their bytes.
            full_every: Every such version is full, those between are deltas; 1 = all. SGLang reads only full ones.
            durable: Whether a version is brought to the disk before it appears. Without it a power loss may damage
                versions that appeared; their readers notice.
            timeout_s: How long the first process waits for the others, and they for it.

        Raises:
            SyncError: a value is not allowed, the folder cannot be written, or another run publishes there.
        """
        if dtype not in ("bfloat16", "float32") or min(keep, shards, full_every) < 1:
            raise SyncError(
                f"dtype {dtype!r}, keep {keep}, shards {shards}, full_every {full_every}: bfloat16 or float32 and "
                "numbers of at least 1 are allowed"
            )
        self._config, self._dtype, self._tokenizer = config, dtype, _tokenizer_files(tokenizer_folder)
        self._shapes = tensor_shapes(config)
        itemsize = DTYPES[dtype].itemsize
        self._sizes = {name: math.prod(shape) * itemsize for name, shape in self._shapes.items()}
        self._process, self._processes = jax.process_index(), jax.process_count()
        self._store = VersionStore(
            Path(root),
            keep=keep,
            durable=durable,
            process=self._process,
            processes=self._processes,
            timeout_s=timeout_s,
        )
        self._files = _split(self._sizes, max(shards, self._processes))
        self._cast = jax.jit(lambda arrays: [jnp.array(array, dtype, copy=True) for array in arrays])
        self._full_every, self._since_full = full_every, 0
        self._held: dict[str, Tensor] = {}  # what was published last, if deltas are wanted
        self._session = _agree(secrets.randbelow(1 << 31))
        self._counter = itertools.count()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._pending: Pending | None = None
        # Compressed, weights take four times the CPU time for a fifth less space.
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        self._orbax = ocp.AsyncCheckpointer(handler) if orbax else None

    def publish(self, params: Params, version: int) -> Pending:
        """Begin to write a version; returns when the parameters may be donated.

        It waits for the version before, if that is still being written.

        Args:
            params: `nnx.state(model, nnx.Param)`.
            version: Number above all that are there.

        Raises:
            SyncError: the version before failed (said once, the next call tries again), `version` is not above it, the
                parameters are of another model, or there is no space.
        """
        self._settle()
        values = {name: variable[...] for name, variable in named(params).items()}
        if differing := {name: value.shape for name, value in values.items()}.items() ^ self._shapes.items():
            names = sorted(dict(differing))
            raise SyncError(f"version {version}: the parameters are of another model; first difference at {names[0]}")
        draft = self._store.root / f".draft-{self._session}-{next(self._counter)}"
        with self._failing(version, draft):
            self._store.begin(draft, version)
            cast = {
                file: dict(zip(names, self._cast([values[name] for name in names]), strict=True))
                for file, names in self._files.items()
            }
            is_delta = bool(self._held) and self._since_full + 1 < self._full_every
            if self._processes > 1:
                self._begin_orbax(draft, cast, is_delta)
            job = _Job(version, draft, is_delta, self._own(cast))
        self._pending = Pending(version, self._worker.submit(self._write, job))
        return self._pending

    def set_aside_from(self, version: int) -> None:
        """Forget this version and newer ones: a run that went back to an older step publishes them anew."""
        self._settle()
        self._store.set_aside_from(version)
        _agree(version)  # the first process has done it
        self._store.reread_parent()
        self._held = {}

    def close(self) -> None:
        """Finish what is being written and release the folder; raises what `publish` would."""
        try:
            self._settle()
        finally:
            self._worker.shutdown()
            if self._orbax is not None:
                self._orbax.close()
            self._store.close()

    def __enter__(self) -> "Publisher":
        """The publisher itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not (pending.done and pending.told):
            pending.wait()

    def _begin_orbax(self, draft: Path, shards: Mapping[str, Mapping[str, jax.Array | Tensor]], is_delta: bool) -> None:
        """Copy to the host and begin to write. Several processes do it together, so not in a thread of each."""
        if self._orbax is not None and not is_delta:
            if self._process == 0:
                require_space(draft / "reserve", sum(self._sizes.values()))
            leaves = {name: array for arrays in shards.values() for name, array in arrays.items()}
            self._orbax.save((draft / ORBAX).absolute(), args=ocp.args.PyTreeSave(leaves))

    def _own(self, cast: dict[str, dict[str, jax.Array]]) -> dict[str, dict[str, jax.Array | Tensor]]:
        """This process's shards. Of several, each gathers all shards one by one and brings only its own to the host."""
        if self._processes == 1:
            return {file: dict(arrays) for file, arrays in cast.items()}
        own: dict[str, dict[str, jax.Array | Tensor]] = {}
        for number, (file, arrays) in enumerate(cast.items()):
            place = next(iter(arrays.values())).sharding
            if not isinstance(place, NamedSharding):
                raise SyncError("several processes publish parameters that lie on a mesh")
            whole = jax.jit(lambda parts: parts, out_shardings=NamedSharding(place.mesh, PartitionSpec()))(arrays)
            if number % self._processes == self._process:
                own[file] = {
                    name: np.asarray(whole[name].addressable_data(0)) for name in arrays
                }  # a jitted dict is sorted
            jax.block_until_ready(whole)  # one shard at a time is whole on the devices
        return own

    def _write(self, job: _Job) -> Path:
        """In the background thread: all of this process's part, then the version."""
        with self._failing(job.version, job.draft):
            if self._processes == 1:
                self._begin_orbax(job.draft, job.shards, job.is_delta)
            part, fresh = Part(), {}
            for file, tensors in _fetched(job.shards):
                if job.is_delta:
                    old = {name: self._held[name] for name in tensors}
                    part.merge(self._store.write_delta(job.draft, file.replace("model", "delta"), old, tensors))
                else:
                    part.merge(self._store.write_shard(job.draft, file, tensors, self._dtype))
                fresh |= tensors if self._full_every > 1 else {}
            if self._orbax is not None:
                self._orbax.wait_until_finished()
            if self._process == 0:
                self._write_view(job)
            folder = self._store.commit(
                job.draft,
                part,
                names=list(self._shapes),
                version=job.version,
                kind="delta" if job.is_delta else "full",
                dtype=self._dtype,
            )
        self._held = fresh
        self._since_full = self._since_full + 1 if job.is_delta else 0
        return folder

    def _write_view(self, job: _Job) -> None:
        """What makes shards a Hugging Face folder."""
        write_json(job.draft / "config.json", self._config.to_hf() | {"torch_dtype": self._dtype})
        if not job.is_delta:
            weight_map = {name: file for file, names in self._files.items() for name in names}
            index = {"metadata": {"total_size": sum(self._sizes.values())}, "weight_map": weight_map}
            write_json(job.draft / INDEX, index)
            for path in self._tokenizer:
                self._store.copy(job.draft, path)

    @contextmanager
    def _failing(self, version: int, draft: Path) -> Generator[None]:
        """Turn what a disk, Orbax or a full device says into one error, and leave nothing behind."""
        try:
            yield
        except (OSError, ValueError, SyncError, jax.errors.JaxRuntimeError) as error:
            if self._orbax is not None:
                with suppress(OSError, ValueError):
                    self._orbax.wait_until_finished()
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
            self._store.discard(draft, reason)
            if isinstance(error, SyncError):
                raise
            raise SyncError(f"{self._store.root / str(version)}: cannot be written: {reason}") from error


def restore(bundle: Bundle, like: Params) -> Params:
    """Parameters from the Orbax copy of a verified version, each process reading only what its devices need.

    Args:
        bundle: What `read_bundle` gave.
        like: State of the engine's model; its dtypes and shardings are those of the result.

    Raises:
        SyncError: the version has no Orbax copy.
    """
    if not any(name.startswith(f"{ORBAX}/") for name in bundle.manifest.files):
        raise SyncError(f"{bundle.folder}: has no Orbax copy; load its safetensors files")
    target = {
        name: jax.ShapeDtypeStruct(value[...].shape, value[...].dtype, sharding=value[...].sharding)
        for name, value in named(like).items()
    }
    placed = ocp.checkpoint_utils.construct_restore_args(target)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        path = (bundle.folder / ORBAX).absolute()
        found = checkpointer.restore(path, args=ocp.args.PyTreeRestore(target, restore_args=placed))
    return with_values(like, found)


def _fetched(shards: dict[str, dict[str, jax.Array | Tensor]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Shards on the host, one by one; the next one is on its way while one is used."""
    files = list(shards)
    for file, following in zip(files, [*files[1:], None], strict=True):
        for array in shards[following].values() if following else ():
            if isinstance(array, jax.Array):
                array.copy_to_host_async()
        yield file, {name: np.asarray(array) for name, array in shards.pop(file).items()}


def _split(sizes: Mapping[str, int], shards: int) -> dict[str, list[str]]:
    """Tensors by file: runs of about equal bytes, at most `shards` of them."""
    total, done = sum(sizes.values()), 0
    runs: dict[int, list[str]] = {}
    for name, size in sizes.items():
        runs.setdefault(min((2 * done + size) * shards // (2 * total), shards - 1), []).append(name)
        done += size
    return {f"model-{i + 1:05d}-of-{len(runs):05d}.safetensors": names for i, names in enumerate(runs.values())}


def _tokenizer_files(folder: Path | None) -> list[Path]:
    found = (
        [] if folder is None else [Path(folder) / name for name in TOKENIZER_FILES if (Path(folder) / name).exists()]
    )
    if folder is not None and not (Path(folder) / "tokenizer.json").exists():
        raise SyncError(f"{folder}: no tokenizer.json to publish")
    return found


def _agree(number: int) -> int:
    """The first process's number."""
    return number if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(number)))
