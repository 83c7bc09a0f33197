"""SIGTERM is heard and passed on; a process without progress ends itself and says where it was."""

import os
import signal
import subprocess
import sys
import time

import pytest

from empo2_jax.distributed import Gang
from empo2_jax.interrupts import Stopped, uninterrupted
from empo2_jax.watch import EXIT_STUCK, POLL_S, STOPPING, Watch


class Peers(Gang):
    """Two processes of which the other may have been asked to stop."""

    def __init__(self, stop: bool) -> None:
        super().__init__(0, 2)
        self.stop, self.told = stop, 0

    def told_stop(self) -> bool:
        return self.stop

    def tell_stop(self) -> None:
        self.told += 1


def wait_for(watch: Watch) -> None:
    deadline = time.monotonic() + 10
    while not watch.asked:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sigterm_stops_at_the_next_check_and_is_told_once() -> None:
    before, peers = signal.getsignal(signal.SIGTERM), Peers(False)
    with Watch(peers, 0.0) as watch:
        watch.check("rollout")
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(watch)
        with pytest.raises(Stopped):
            watch.check("rollout")
        time.sleep(3 * POLL_S)
    assert peers.told == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_first_ctrl_c_asks_and_the_second_raises_once_a_save_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    before, done = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), Watch(Gang(), 0.0) as watch:
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(watch)
        with pytest.raises(Stopped):
            watch.check("rollout")
        said = ""
        deadline = time.monotonic() + 10
        while not said:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            said = capsys.readouterr().err
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            done.append("saved")
        done.append("never")
    assert done == ["saved"]
    assert said == f"{STOPPING}\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_what_another_process_was_asked_is_heard() -> None:
    with Watch(Peers(True), 0.0) as watch:
        wait_for(watch)


def test_no_progress_ends_the_process_with_stacks_and_progress_does_not() -> None:
    source = (
        "import time\n"
        "from empo2_jax.distributed import Gang\n"
        "from empo2_jax.watch import Watch\n"
        "def stuck():\n    time.sleep(60)\n"
        "with Watch(Gang(), 1.5) as watch:\n"
        "    for _ in range(4):\n        time.sleep(0.75); watch.beat('update')\n"
        "    print('alive', flush=True)\n"
        "    stuck()\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (EXIT_STUCK, "alive\n")
    assert done.stderr.startswith("error: process 0 of 1: no progress for ")
    assert "s in: update; ended\n" in done.stderr
    assert "in stuck" in done.stderr


def test_a_stop_can_be_asked_for_from_inside() -> None:
    watch = Watch(Gang(), 0.0)
    watch.check("rollout")
    watch.ask()
    with pytest.raises(Stopped):
        watch.check("rollout")
