"""A run directory elsewhere: snapshots on any fsspec storage (s3://, gs://, file://), taken after every checkpoint.

The run itself stays on the local disk, where renames are atomic. A snapshot is the whole directory: every file is an
object named by its SHA-256, and `snapshots/<n>.json`, written last, names them all. So a snapshot is there in full or
not at all, and what did not change is neither read nor sent again. A run that starts in an empty directory takes the
newest one over, every file checked; a directory that was taken over by another may not go on with it.

Sending is a process of its own, since storage clients hang, raise anything and dislike other threads: a storage that is
down costs a warning and is tried again. Keys and addresses are the environment's (AWS_*, GOOGLE_*, FSSPEC_*).
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Set
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Any

import fsspec

from empo2_jax.checkpoint_files import canonical, read_json, sync_tree
from empo2_jax.errors import CheckpointError, ConfigError, Empo2Error
from empo2_jax.metrics import write_atomically

STATE = ".mirror.json"  # which snapshots this directory may follow
READ = ".mirror.read.json"  # checksums of files that were read before
LINKS = ".mirror"  # the files of the snapshot that is being sent
KEPT = 2  # snapshots; a reader may be at the one before the last
POLL_S = 1.0
AGAIN_S = 60.0  # after a failure
LIMIT_S = 3600.0  # for one snapshot; the end of a run may wait for two
SETTLED_NS = 2 * 10**9  # a file that changed later than this before it was read may change again unseen
CHUNK = 1 << 22
_CHECKPOINTS = "checkpoints"

_log = logging.getLogger(__name__)


class Mirror:
    """Context manager around a run: takes over what is there, then sends a snapshot after every checkpoint."""

    def __init__(self, run_dir: Path, url: str, again_s: float = AGAIN_S) -> None:
        """Nothing happens if `url` is empty."""
        self._run_dir, self._url, self._again_s = run_dir, url, again_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        """`take_over` and begin to watch."""
        if self._url:
            take_over(self._run_dir, self._url)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the end of the run."""
        if self._url:
            self._done.set()
            self._thread.join()

    def _watch(self) -> None:
        sent: list[int] = []  # what is there at the start may not have been sent, or has a new owner now
        next_try = 0.0
        while not self._done.wait(POLL_S):
            steps = _steps(self._run_dir)
            if steps == sent or time.monotonic() < next_try:
                continue
            if self._push():
                sent = steps
            next_try = time.monotonic() + (0.0 if steps == sent else self._again_s)
        self._push()

    def _push(self) -> bool:
        problem = _child("push", self._run_dir, self._url)
        if problem:
            _log.warning("storage %s: not sent: %s", self._url, problem)
        return not problem


def take_over(run_dir: Path, url: str) -> None:
    """`fetch` in a process of its own.

    Raises:
        ConfigError: see `check_url`.
        CheckpointError: with the reason of `fetch` or of the storage's client.
    """
    check_url(url)
    problem = _child("fetch", run_dir, url)
    if problem:
        raise CheckpointError(f"storage {url}: {problem}")


def check_url(url: str) -> None:
    """Raise `ConfigError` if a URL names a storage that is unknown, or whose client is not installed."""
    protocol = url.partition("://")[0] if "://" in url else "file"
    if protocol not in fsspec.available_protocols():
        raise ConfigError(f"storage {url}: {protocol!r} is unknown; s3, gs and file are common ones")
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise ConfigError(f"storage {url}: {error}") from None


def push(run_dir: Path, url: str) -> int | None:
    """Send a snapshot of the run directory as it is; returns its number, None if there is no checkpoint yet.

    Raises:
        CheckpointError: another run directory took the snapshots over.
        OSError: the storage cannot be written (its client may raise other errors too).
    """
    with _alone(run_dir):
        if not _steps(run_dir):
            return None
        state = _state(run_dir)
        storage = _Storage(url)
        newest = storage.newest()
        number = 1
        if newest is not None:
            number = newest["number"] + 1
            _check_owner(newest, state, url)
        shutil.rmtree(run_dir / LINKS, ignore_errors=True)
        try:
            read = _Checksums(run_dir / READ)
            files = storage.send(_linked(run_dir), read)
            read.save(files.keys())
        finally:
            shutil.rmtree(run_dir / LINKS, ignore_errors=True)
        storage.commit({"number": number, "token": state["token"], "step": _steps(run_dir)[-1], "files": files})
        storage.drop_old()
        return number


def fetch(run_dir: Path, url: str) -> int | None:
    """Take the newest snapshot over into a run directory without checkpoints; returns its step, None if nothing was.

    Raises:
        CheckpointError: a file is missing or damaged there, or this directory has checkpoints that it does not know.
    """
    with _alone(run_dir):
        state = _state(run_dir)
        storage = _Storage(url)
        newest = storage.newest()
        if newest is None:
            return None
        if _steps(run_dir):
            _check_owner(newest, state, url)
            return None
        draft = run_dir / ".fetch"
        shutil.rmtree(draft, ignore_errors=True)
        storage.receive(newest["files"], draft)
        sync_tree(draft)
        # First: with checkpoints that it does not own, a directory is refused.
        _write_state(run_dir, {"token": uuid.uuid4().hex, "over": newest["token"]})
        for path in sorted(draft.iterdir(), key=lambda path: path.name == _CHECKPOINTS):  # last: they make it a run
            target = run_dir / path.name
            if target.is_dir():
                shutil.rmtree(target)
            path.replace(target)
        draft.rmdir()
        return newest["step"]


class _Checksums:
    """Checksums by name of files that were read: the same size, time of change and inode mean the same content."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[Any]] = {}
        with contextlib.suppress(CheckpointError):  # damaged: all is read again
            self._known = read_json(path) if path.is_file() else {}
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


class _Storage:
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
            snapshot = json.loads(self._fs.cat_file(f"{self._snapshots}/{name}"))
        except ValueError:
            return None
        return snapshot if isinstance(snapshot, dict) and snapshot.pop("seal", None) == _seal(snapshot) else None

    def send(self, files: Mapping[str, tuple[Path, os.stat_result]], read: _Checksums) -> dict[str, list[Any]]:
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


def _check_owner(newest: Mapping[str, Any], state: Mapping[str, str], url: str) -> None:
    if newest["token"] not in (state["token"], state["over"]):
        raise CheckpointError(
            f"{url}: another run directory goes on with these snapshots (step {newest['step']}); "
            "an empty run.dir takes them over, another run.mirror begins new ones"
        )


def _linked(run_dir: Path) -> dict[str, tuple[Path, os.stat_result]]:
    """Hard links to all files that are not hidden, with the sizes that count: retention and appends go on meanwhile."""
    while True:
        files: dict[str, tuple[Path, os.stat_result]] = {}
        try:
            for path in sorted(run_dir.rglob("*")):
                relative = path.relative_to(run_dir)
                if path.is_file() and not any(part.startswith(".") for part in relative.parts):
                    link = run_dir / LINKS / relative
                    link.parent.mkdir(parents=True, exist_ok=True)
                    os.link(path, link)
                    files[relative.as_posix()] = link, link.stat()
            return files
        except FileNotFoundError:  # a checkpoint or an old episode went just now: once more
            shutil.rmtree(run_dir / LINKS, ignore_errors=True)


def _steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / _CHECKPOINTS).glob("[0-9]*") if path.name.isdecimal())


@contextlib.contextmanager
def _alone(run_dir: Path) -> Generator[None, None, None]:
    """One process at a time: that of a run that was killed may still be sending."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / ".mirror.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _state(run_dir: Path) -> dict[str, str]:
    if not (run_dir / STATE).is_file():
        _write_state(run_dir, {"token": uuid.uuid4().hex, "over": ""})
    state: dict[str, str] = read_json(run_dir / STATE)
    return state


def _write_state(run_dir: Path, state: dict[str, str]) -> None:
    write_atomically(run_dir / STATE, json.dumps(state) + "\n")


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


def _child(action: str, run_dir: Path, url: str) -> str:
    """Run `push` or `fetch` as a process; returns why it failed, "" if it did not."""
    command = [sys.executable, "-m", "empo2_jax.storage", action, str(run_dir), url]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT_S, "start_new_session": True}
    try:
        done = subprocess.run(command, check=False, **options)
    except subprocess.TimeoutExpired:
        return f"not done within {LIMIT_S:g} s"
    except OSError as error:  # no memory for a process
        return str(error)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if done.returncode == 0 else lines[-1] if lines else f"exit code {done.returncode}"


def main(action: str, run_dir: Path, url: str) -> int:
    """What the child process does."""
    try:
        {"push": push, "fetch": fetch}[action](run_dir, url)
    except Empo2Error as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
