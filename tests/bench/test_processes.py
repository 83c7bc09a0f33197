"""What `/proc` says of real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from empo2_jax.bench import processes

SLEEPS = "import sys; print('up', flush=True); sys.stdin.read()"


@contextmanager
def child(source: str = SLEEPS, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has said its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_child_is_found_by_parent_by_mark_and_by_its_words() -> None:
    with child(SLEEPS, "some.Name", EMPO2_TEST_MARK="found") as process:
        assert process.pid in processes.children(os.getpid())
        assert processes.marked("EMPO2_TEST_MARK", "found") == [process.pid]
        assert processes.command_line(process.pid).endswith(" some.Name ")
        assert not processes.is_zombie(process.pid)
    assert process.pid not in processes.children(os.getpid())
    assert processes.marked("EMPO2_TEST_MARK", "found") == []
    assert processes.command_line(process.pid) == ""


def test_one_that_nobody_waited_for_is_a_zombie_until_somebody_does() -> None:
    with child() as process:
        process.kill()
        deadline = time.monotonic() + 10
        while not processes.is_zombie(process.pid):
            assert time.monotonic() < deadline
        assert process.pid in processes.children(os.getpid())
        assert processes.own_bytes(process.pid) == 0
    assert not processes.is_zombie(process.pid)


def test_memory_and_descriptors_are_those_of_the_process() -> None:
    with child() as small, child("held = bytearray(64 << 20); " + SLEEPS) as large:
        assert 60e6 < processes.own_bytes(large.pid) - processes.own_bytes(small.pid) < 70e6
        assert processes.peak_bytes(large.pid) >= processes.own_bytes(large.pid)
        assert processes.descriptors(small.pid) == 3
    with child("import os; kept = [os.dup(0) for _ in range(5)]; " + SLEEPS) as more:
        assert processes.descriptors(more.pid) == 8


def test_cpu_seconds_count_running_and_ended_children() -> None:
    before = processes.children_cpu()
    busy = "import time\nwhile time.process_time() < 0.3: pass\n" + SLEEPS
    with child(busy) as process:
        running = processes.children_cpu() - before
        assert 0.25 < processes.cpu_seconds(process.pid) <= running + 0.02
    assert 0.25 < processes.children_cpu() - before < 2


def test_one_that_is_gone() -> None:
    with child() as process:
        pass
    assert processes.children(process.pid) == []
    with pytest.raises(OSError):
        processes.own_bytes(process.pid)
