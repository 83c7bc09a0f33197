"""The writer's side of a root folder, with plain arrays: links, several processes, deletion and what a crash leaves."""

import os
import shutil
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from empo2_jax.errors import SyncError
from empo2_jax.sync import store as store_module
from empo2_jax.sync.bundle import lease
from empo2_jax.sync.manifest import read_manifest, versions
from empo2_jax.sync.store import Part, VersionStore

NAMES = ("a", "b")


@contextmanager
def store(
    root: Path,
    *,
    keep: int = 9,
    process: int = 0,
    processes: int = 1,
    timeout_s: float = 20.0,
    durable: bool = False,
) -> Generator[VersionStore]:
    made = VersionStore(root, keep=keep, durable=durable, process=process, processes=processes, timeout_s=timeout_s)
    try:
        yield made
    finally:
        made.close()


def add(target: VersionStore, version: int, a: float, b: float) -> Path:
    """A version of two shards with one tensor each."""
    draft, part = target.root / f".draft-{version}", Part()
    target.begin(draft, version)
    for name, value in zip(NAMES, (a, b), strict=True):
        part.merge(target.write_shard(draft, f"{name}.safetensors", {name: np.full(3, value, np.float32)}, "float32"))
    return target.commit(draft, part, names=NAMES, version=version, kind="full", dtype="float32")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".writer")


def test_equal_shards_share_an_inode_over_generations(tmp_path: Path) -> None:
    with store(tmp_path) as target:
        folders = [add(target, version, 1, version) for version in (1, 2, 3)]
    assert len({(folder / "a.safetensors").stat().st_ino for folder in folders}) == 1
    assert len({(folder / "b.safetensors").stat().st_ino for folder in folders}) == 3
    assert (folders[0] / "a.safetensors").stat().st_nlink == 3


def test_a_shard_that_does_not_reach_the_disk_makes_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def failing_once(path: Path) -> None:
        synced.append(path.name)
        if synced.count("b.safetensors") == 1 and path.name == "b.safetensors":
            raise OSError("the disk is gone")

    with store(tmp_path, durable=True) as target:
        monkeypatch.setattr(store_module, "sync", failing_once)
        with pytest.raises(OSError, match="the disk is gone"):
            add(target, 1, 1, 1)
        assert versions(tmp_path) == []
        target.discard(tmp_path / ".draft-1", "the disk is gone")
        add(target, 2, 1, 1)
    assert versions(tmp_path) == [2]
    assert synced == ["a.safetensors", "b.safetensors"] * 2 + [tmp_path.name]


def test_a_restarted_writer_links_too(tmp_path: Path) -> None:
    with store(tmp_path) as target:
        first = add(target, 1, 1, 1)
    with store(tmp_path) as target:
        second = add(target, 2, 1, 2)
    assert (first / "a.safetensors").samefile(second / "a.safetensors")
    assert read_manifest(second).parent == read_manifest(first).reference


@pytest.mark.parametrize("trouble", ["no links", "gone", "damaged"])
def test_without_links_the_shard_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    with store(tmp_path) as target:
        first = add(target, 1, 1, 1)
        if trouble == "gone":
            shutil.rmtree(first)
        elif trouble == "damaged":
            content = (first / "a.safetensors").read_bytes()
            (first / "a.safetensors").write_bytes(content[:-1] + b"x")
        else:
            monkeypatch.setattr(os, "link", refuse)
        second = add(target, 2, 1, 1)
    assert (second / "a.safetensors").stat().st_nlink == 1
    np.testing.assert_array_equal(load_file(second / "a.safetensors")["a"], np.ones(3, np.float32))


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    with store(tmp_path) as target:
        add(target, 1, 1, 1)
    for name in (".draft-7-0", ".old-0"):
        (tmp_path / name / "orbax").mkdir(parents=True)
    with store(tmp_path):
        assert names(tmp_path) == ["1"]


def test_set_aside_keeps_what_is_read(tmp_path: Path) -> None:
    with store(tmp_path) as target:
        for version in (1, 2, 3):
            add(target, version, version, version)
        with lease(tmp_path / "3"):
            target.set_aside_from(2)
            assert versions(tmp_path) == [1]
            (aside,) = [name for name in names(tmp_path) if name.startswith(".aside-")]
            assert aside.startswith(".aside-3-")
            add(target, 2, 5, 5)
            assert aside in names(tmp_path)
        target.set_aside_from(9)
        assert names(tmp_path) == ["1", "2"]
        target.set_aside_from(0)
        assert target.parent is None


def test_a_read_only_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SyncError, match="file/root: cannot be written: Not a directory"), store(tmp_path / "file/root"):
        pass


def shared(root: Path, process: int, errors: list[str], *, fail: bool = False) -> None:
    """Process `process` of two, in a thread: writes its tensor of version 1."""
    try:
        with store(root, process=process, processes=2, timeout_s=2.0) as target:
            draft = root / ".draft"
            target.begin(draft, 1)
            if fail:
                while process == 0 and not (draft / NAMES[1]).exists():
                    time.sleep(0.001)  # what it removes is there
                target.discard(draft, "No space left on device")
                return
            name = NAMES[process]
            part = target.write_shard(draft, name, {name: np.full(3, process, np.float32)}, "float32")
            target.commit(draft, part, names=NAMES, version=1, kind="full", dtype="float32")
    except SyncError as error:
        errors.append(str(error))


def both(root: Path, **fails: bool) -> list[str]:
    errors: list[str] = []
    threads = [
        threading.Thread(target=shared, args=(root, process, errors), kwargs={"fail": fails.get(f"p{process}", False)})
        for process in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_two_processes_make_one_version(tmp_path: Path) -> None:
    assert both(tmp_path) == []
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == ["a", "b", "manifest.json"]
    assert list(read_manifest(tmp_path / "1").tensors) == ["a", "b"]


def test_the_second_process_tells_the_first_what_went_wrong(tmp_path: Path) -> None:
    assert both(tmp_path, p1=True) == ["process 1: No space left on device"]
    assert not versions(tmp_path)


def test_the_second_process_does_not_wait_for_a_first_that_gave_up(tmp_path: Path) -> None:
    (error,) = both(tmp_path, p0=True)
    assert error.startswith(f"{tmp_path / '1'}: the first process did not finish the version")


def test_a_process_that_never_writes_is_named_in_time(tmp_path: Path) -> None:
    errors: list[str] = []
    shared(tmp_path, 0, errors)
    assert errors == [f"{tmp_path / '.draft'}: process 1 did not write its part within 2 s"]
