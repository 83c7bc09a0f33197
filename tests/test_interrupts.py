"""Signals in a block that leaves nothing behind end the process with one line, however many come."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import atexit, time
from empo2_jax.interrupts import ended_at_once
atexit.register(lambda: print("the interpreter's own end"))
with ended_at_once():
    print("started", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "stopped\n")]
)
def test_a_signal_ends_the_process_at_once(number: signal.Signals, code: int, said: str) -> None:
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        for _ in range(2):
            process.send_signal(number)
        assert process.communicate(timeout=30) == ("", said)
    assert process.returncode == code
