"""A run directory elsewhere: snapshots on any fsspec storage (s3://, gs://, file://), taken after every checkpoint.

The run itself stays on the local disk, where renames are atomic. A snapshot is the whole directory, there in full or
not at all (`snapshots.py`). A run that starts in an empty directory takes the newest one over, every file checked; a
directory that was taken over by another may not go on with it.

Sending is a process of its own, since storage clients hang, raise anything and dislike other threads: a storage that is
down costs a warning and is tried again. Keys and addresses are the environment's (AWS_*, GOOGLE_*, FSSPEC_*).
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from empo2_jax.checkpoint_files import check_writable, read_object, sync_tree
from empo2_jax.errors import GUIDE, CheckpointError, Empo2Error
from empo2_jax.metrics import write_atomically
from empo2_jax.snapshots import Checksums, Storage, check_url

STATE = ".mirror.json"  # which snapshots this directory may follow
READ = ".mirror.read.json"  # checksums of files that were read before
LINKS = ".mirror"  # the files of the snapshot that is being sent
DRAFT = ".fetch"  # the files of one that is being fetched
LOCK = ".mirror.lock"
POLL_S = 1.0
AGAIN_S = 60.0  # after a failure
LIMIT_S = 3600.0  # for one snapshot; the end of a run may wait for two
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
            _log.warning("storage %s: not sent: %s; %ssnapshots-that-are-not-sent", self._url, problem, GUIDE)
        return not problem


def take_over(run_dir: Path, url: str) -> None:
    """`fetch` in a process of its own; where nothing was taken over, nothing is left that was not there before.

    Raises:
        ConfigError: see `check_url`.
        CheckpointError: the directory cannot be written, or with the reason of `fetch` or of the storage's client.
    """
    check_url(url)
    check_writable(run_dir)
    with _traceless(run_dir):
        problem = _child("fetch", run_dir, url)
    if problem:
        raise CheckpointError(f"storage {url}: {problem}")


@contextlib.contextmanager
def _traceless(run_dir: Path) -> Generator[None, None, None]:
    """Remove what a `fetch` in the block made in vain, one that was killed too; not while another process is there."""
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError, BlockingIOError), (run_dir / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(run_dir / LOCK, lock):
                shutil.rmtree(run_dir / DRAFT, ignore_errors=True)
                if not (run_dir / STATE).exists():
                    (run_dir / LOCK).unlink()
        for folder in made:
            with contextlib.suppress(OSError):  # it has something in it
                folder.rmdir()


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
        storage = Storage(url)
        newest = storage.newest()
        number = 1
        if newest is not None:
            number = newest["number"] + 1
            _check_owner(newest, state, url)
        shutil.rmtree(run_dir / LINKS, ignore_errors=True)
        try:
            read = Checksums(run_dir / READ)
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
        storage = Storage(url)
        newest = storage.newest()
        if newest is None:
            return None
        if _steps(run_dir):
            _check_owner(newest, _state(run_dir), url)
            return None
        draft = run_dir / DRAFT
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
    path = run_dir / LOCK
    while True:
        run_dir.mkdir(parents=True, exist_ok=True)
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_at(path, lock):  # else whoever had it before removed it
                yield
                return


def _is_at(path: Path, file: IO[str]) -> bool:
    """Whether an open file is the one that the path names now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _state(run_dir: Path) -> dict[str, str]:
    if not (run_dir / STATE).is_file():
        _write_state(run_dir, {"token": uuid.uuid4().hex, "over": ""})
    state: dict[str, str] = read_object(run_dir / STATE, dict[str, str])
    return state


def _write_state(run_dir: Path, state: dict[str, str]) -> None:
    write_atomically(run_dir / STATE, json.dumps(state) + "\n")


def _child(action: str, run_dir: Path, url: str) -> str:
    """Run `push` or `fetch` as a process; returns why it failed, "" if it did not."""
    command = [sys.executable, "-m", "empo2_jax.storage", action, str(run_dir), url]
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "start_new_session": True}
    try:
        with subprocess.Popen(command, text=True, **options) as process:
            try:
                _, errors = process.communicate(timeout=LIMIT_S)
            finally:  # after Ctrl-C too it is over when this returns
                process.kill()
                process.wait()
    except subprocess.TimeoutExpired:
        return f"not done within {LIMIT_S:g} s"
    except OSError as error:  # no memory for a process
        return str(error)
    lines = [line for line in errors.splitlines() if line.strip()]
    return "" if process.returncode == 0 else lines[-1] if lines else f"exit code {process.returncode}"


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
