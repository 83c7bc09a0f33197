"""Snapshots of a run directory: whole or absent, checked, with one owner; a run that moves to another machine."""

import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import pytest

from empo2_jax import snapshots, storage
from empo2_jax.cli import main
from empo2_jax.errors import CheckpointError
from empo2_jax.storage import Mirror, fetch, push, take_over
from tests.fixtures.processes import LIMIT_S, SUICIDE, assert_same, empo2, finish, start, train_arguments


def make_run(run_dir: Path, step: int = 1) -> Path:
    folder = run_dir / "checkpoints" / str(step)
    folder.mkdir(parents=True)
    (folder / "state").write_bytes(bytes(range(256)) * 99)
    (folder / "cursor.json").write_text(json.dumps({"iteration": step}))
    (run_dir / "metrics.jsonl").write_text("{}\n" * step)
    (run_dir / ".lock").touch()
    return run_dir


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return {name: content for name, content in names.items() if not any(p.startswith(".") for p in name.split("/"))}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/elsewhere"


def objects(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "elsewhere/objects").iterdir())


def test_an_empty_directory_takes_over_every_byte(tmp_path: Path, url: str) -> None:
    run = make_run(tmp_path / "run", 3)
    assert fetch(tmp_path / "other", url) is None  # nothing there yet
    assert push(run, url) == 1
    assert fetch(tmp_path / "other", url) == 3
    assert contents(tmp_path / "other") == contents(run) and len(contents(run)) == 3
    assert sorted(path.name for path in run.iterdir()) == [
        ".lock",
        ".mirror.json",
        ".mirror.lock",
        ".mirror.read.json",
        "checkpoints",
        "metrics.jsonl",
    ]


def test_what_did_not_change_is_not_sent_again_and_old_snapshots_go(tmp_path: Path, url: str) -> None:
    run = make_run(tmp_path / "run")
    push(run, url)
    before = {path: path.stat().st_mtime_ns for path in objects(tmp_path)}
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    assert push(run, url) == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(objects(tmp_path)) == 4  # state, cursor, metrics of then and now
    assert push(run, url) == 3
    assert len(objects(tmp_path)) == 3
    names = sorted(path.name for path in (tmp_path / "elsewhere/snapshots").iterdir())
    assert names == ["000000002.json", "000000003.json"]


def test_what_did_not_change_is_not_read_again(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, parts, reads = make_run(tmp_path / "run", 3), snapshots._parts, []
    state = run / "checkpoints/3/state"

    def counted(file: IO[bytes], size: int) -> Iterator[bytes]:
        if (path := Path(file.name)).is_relative_to(run):  # not what is fetched
            reads.append(path.relative_to(run / ".mirror").as_posix())
        return parts(file, size)

    def read() -> set[str]:
        reads.clear()
        push(run, url)
        return set(reads)

    monkeypatch.setattr(snapshots, "_parts", counted)
    assert len(read()) == 3
    assert len(read()) == 3  # they changed just now and may have changed again
    for path in [*state.parent.iterdir(), run / "metrics.jsonl"]:
        os.utime(path, ns=(10**18, 10**18))
    assert len(read()) == 3 and read() == set()
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    assert read() == {"metrics.jsonl"}
    other = run / "other"
    other.write_bytes(state.read_bytes()[::-1])
    os.utime(other, ns=(10**18, 10**18))
    other.replace(state)  # of the same size and time
    assert "checkpoints/3/state" in read()
    assert fetch(tmp_path / "back", url) == 3
    assert contents(tmp_path / "back") == contents(run)
    shutil.rmtree(tmp_path / "elsewhere")  # what is known of files is known of the directory, not of the storage
    push(run, url)
    assert fetch(tmp_path / "again", url) == 3
    assert contents(tmp_path / "again") == contents(run)


def test_a_directory_without_a_checkpoint_is_not_sent(tmp_path: Path, url: str) -> None:
    (tmp_path / "run").mkdir()
    assert push(tmp_path / "run", url) is None
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_that_was_taken_over_may_not_go_on(tmp_path: Path, url: str) -> None:
    first, second = make_run(tmp_path / "first"), tmp_path / "second"
    push(first, url)
    fetch(second, url)
    assert push(first, url) == 2  # the other one has not sent anything: it is to fetch again
    assert push(second, url) == 3 if fetch(second, url) is None else False
    for action in (push, fetch):
        with pytest.raises(CheckpointError, match=r"another run directory goes on with these snapshots \(step 1\)"):
            action(first, url)
    assert push(second, url) == 4


def test_a_directory_that_lost_its_checkpoints_takes_its_own_snapshot_over(tmp_path: Path, url: str) -> None:
    run = make_run(tmp_path / "run", 3)
    push(run, url)
    before = contents(run)
    shutil.rmtree(run / "checkpoints")
    assert fetch(run, url) == 3
    assert contents(run) == before
    assert push(run, url) == 2


def test_a_take_over_that_was_killed_at_its_end_is_one(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(make_run(tmp_path / "run", 3), url)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="killed"):
        patched.setattr(Path, "rmdir", lambda path: (_ for _ in ()).throw(OSError("killed")))
        fetch(tmp_path / "other", url)
    assert fetch(tmp_path / "other", url) is None
    assert push(tmp_path / "other", url) == 2


def test_a_file_that_is_cut_while_it_is_sent_arrives_as_it_is_then(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, parts, reads = make_run(tmp_path / "run", 3), snapshots._parts, []

    def cut(file: IO[bytes], size: int) -> Iterator[bytes]:
        reads.append(Path(file.name).name)
        if reads.count("metrics.jsonl") == 2:  # between its checksum and its sending
            os.truncate(run / "metrics.jsonl", 3)
        return parts(file, size)

    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "_parts", cut)
        push(run, url)
    assert fetch(tmp_path / "other", url) == 3
    assert contents(tmp_path / "other") == contents(run)
    assert contents(run)["metrics.jsonl"] == b"{}\n" and reads.count("metrics.jsonl") == 4


@pytest.mark.parametrize("damage", ["flipped", "missing", "cut"])
def test_a_damaged_object_is_named_and_nothing_is_taken_over(tmp_path: Path, url: str, damage: str) -> None:
    push(make_run(tmp_path / "run"), url)
    largest = max(objects(tmp_path), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    if damage == "missing":
        largest.unlink()
    else:
        largest.write_bytes(content[:-1] + (b"\0" if damage == "flipped" else b""))
    said = "its object is missing" if damage == "missing" else "checksum does not match"
    with pytest.raises(CheckpointError, match=f"checkpoints/1/state: {said}"):
        fetch(tmp_path / "other", url)
    assert contents(tmp_path / "other") == {}


@pytest.mark.parametrize("torn", ["", "{", '{"number": 2, "token": "x", "step": 9, "files": {}, "seal": "no"}', "[]"])
def test_a_snapshot_that_is_not_whole_does_not_count(tmp_path: Path, url: str, torn: str) -> None:
    push(make_run(tmp_path / "run"), url)
    (tmp_path / "elsewhere/snapshots/000000002.json").write_text(torn)
    assert fetch(tmp_path / "other", url) == 1


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/../../outside", "."])
def test_a_name_from_the_storage_is_never_a_path_outside(tmp_path: Path, url: str, name: str) -> None:
    push(make_run(tmp_path / "run"), url)
    path = tmp_path / "elsewhere/snapshots/000000001.json"
    snapshot = json.loads(path.read_text())
    del snapshot["seal"]
    snapshot["files"] = {name: next(iter(snapshot["files"].values()))}
    path.write_text(json.dumps(snapshot | {"seal": snapshots._seal(snapshot)}))
    with pytest.raises(CheckpointError, match="is no path inside a run directory"):
        fetch(tmp_path / "other", url)


def test_a_storage_that_is_down_is_a_warning_and_is_tried_again(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").mkdir()
    run = tmp_path / "run"
    with caplog.at_level(logging.WARNING), Mirror(run, url, again_s=0.1):
        (tmp_path / "elsewhere").write_text("in the way")
        make_run(run, 2)
        deadline = time.monotonic() + 120
        while not caplog.records:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (tmp_path / "elsewhere").unlink()
    assert caplog.records[0].message.startswith(f"storage {url}: not sent: ")
    assert fetch(tmp_path / "other", url) == 2


def test_the_command_brings_a_run_here_and_says_when_there_is_none(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, here = make_run(tmp_path / "run", 3), tmp_path / "here"
    assert main(["fetch", url, str(here)]) == 2
    assert capsys.readouterr().err == f"error: {here}: no checkpoint, and {url} has none\n"
    assert not here.exists()
    push(run, url)
    assert main(["fetch", url, str(here)]) == 0
    assert capsys.readouterr().out == f"{here}: checkpoints [3]\n"
    assert contents(here) == contents(run)
    assert main(["fetch", "nowhere://x", str(here)]) == 2
    assert main(["fetch", url, str(run / "metrics.jsonl/here")]) == 2
    assert capsys.readouterr().err.endswith(f"error: {run}/metrics.jsonl/here: cannot be written: Not a directory\n")


@pytest.mark.parametrize("folder", ["", "new", "new/here/notes"])
def test_a_fetch_that_fails_leaves_what_was_there_before(
    tmp_path: Path, url: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    push(make_run(tmp_path / "run"), url)
    max(objects(tmp_path), key=lambda path: path.stat().st_size).unlink()
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    assert main(["fetch", url, str(tmp_path / "new/here")]) == 2
    assert "checkpoints/1/state: its object is missing" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_interrupted_fetch_leaves_nothing(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(action: str, run_dir: Path, url: str) -> str:
        (run_dir / storage.DRAFT / "checkpoints").mkdir(parents=True)
        (run_dir / storage.LOCK).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "_child", killed)
    with pytest.raises(KeyboardInterrupt):
        take_over(tmp_path / "new/here", url)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_its_holder_removed_is_made_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, flock, waits = make_run(tmp_path / "run"), fcntl.flock, []

    def waiting(file: IO[str], how: int) -> None:
        waits.append(how)
        if len(waits) == 1:
            (run / storage.LOCK).unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", waiting)
    assert push(run, url) == 1
    assert len(waits) == 2 and (run / storage.LOCK).exists()


class Server:
    """Moto's S3 server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        log = (folder / "moto.log").open("wb")
        command = [sys.executable, "-c", "from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])"]
        with log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while b"Running on http" not in (text := (folder / "moto.log").read_bytes()):
            assert self.process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.1)
        self.address = text.decode().partition("Running on ")[2].split()[0]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Server, None, None]:
    moto = Server(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret-of-the-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    try:
        yield moto
    finally:
        moto.process.kill()
        moto.process.wait()


needs_s3 = pytest.mark.skipif(
    find_spec("s3fs") is None or find_spec("moto") is None, reason="the extra `services` is not installed"
)


@pytest.mark.slow
@needs_s3
def test_a_run_killed_here_goes_on_elsewhere_from_a_real_s3_server(server: Server, tmp_path: Path) -> None:
    source = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)
    finish(tmp_path / "reference")
    mirror = ("--run.mirror", "s3://bucket/runs/toy")
    first, second = tmp_path / "first", tmp_path / "second"
    push_once = ("storage:Mirror:_push", "after", "1")
    process = start(*push_once, *train_arguments(first, *mirror), program=(sys.executable, "-c", SUICIDE))
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGKILL, errors[-2000:]
    shutil.rmtree(first)  # that machine is lost
    done = empo2(*train_arguments(second, *mirror))
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same(second, tmp_path / "reference")
    third = tmp_path / "third"
    assert empo2(*train_arguments(third, *mirror)).returncode == 0
    assert_same(third, tmp_path / "reference")
    assert os.environ["AWS_SECRET_ACCESS_KEY"].encode() not in b"".join(contents(second).values())
