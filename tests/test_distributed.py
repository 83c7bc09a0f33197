"""Who takes part, exchanges with deadlines over a store in this process, and a start that fails with its reason."""

import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from empo2_jax.distributed import CHUNK, EXIT_GANG, Gang, Membership, check_covers, current, membership, own_copy, whole
from empo2_jax.errors import ConfigError, DataError, GangError
from empo2_jax.interrupts import Stopped
from empo2_jax.models.sharding import make_mesh
from tests.fixtures.processes import empo2, train_arguments

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "4099",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}
JOBSET = {
    "EMPO2_COORDINATOR": "empo2-workers-0-0.empo2:8476",
    "EMPO2_NUM_PROCESSES": "2",
    "JOB_COMPLETION_INDEX": "1",
}
TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1,t2", "TPU_WORKER_ID": "2"}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, None),
        (SLURM, ("gpu03:61443", 16, 5)),
        (SLURM | {"SLURM_STEP_NODELIST": "m1,m7"}, ("m1:61443", 16, 5)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_JOB_ID": "7"}, None),  # in a batch script without srun
        (JOBSET, ("empo2-workers-0-0.empo2:8476", 2, 1)),
        (JOBSET | {"EMPO2_PROCESS_ID": "0"}, ("empo2-workers-0-0.empo2:8476", 2, 0)),
        (TPU, ("t0:8476", 3, 2)),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
    ],
)
def test_membership_of_the_environment(environment: dict[str, str], wanted: tuple[str, int, int] | None) -> None:
    found = membership(environment)
    assert (found and (found.coordinator, found.processes, found.process)) == wanted


def test_options_come_before_the_environment() -> None:
    assert membership(SLURM, "h:1", 4, 3) == Membership("h:1", 4, 3, "--coordinator --num-processes --process-id")
    assert membership(SLURM, "h:1", 1, 0) is None
    assert membership({}, "auto") == Membership("auto", 0, 0, "--coordinator auto")


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ({}, ("h:1", 2, None), "--coordinator and --num-processes without --process-id"),
        ({}, ("h", 2, 0), "coordinator 'h': HOST:PORT is allowed"),
        ({}, ("h:1", 2, 2), "process 2 of 2: 0 to the number"),
        ({"EMPO2_COORDINATOR": "h:1", "EMPO2_NUM_PROCESSES": "x"}, (), "EMPO2_NUM_PROCESSES = 'x'"),
        ({"EMPO2_COORDINATOR": "h:1", "EMPO2_NUM_PROCESSES": "2"}, (), "JOB_COMPLETION_INDEX = ''"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, (), "start the processes with srun"),
        (SLURM | {"SLURM_STEP_NODELIST": "localhost"}, (), "coordinator localhost:61443 is this host alone"),
        (TPU | {"TPU_WORKER_HOSTNAMES": "127.0.0.1,t1,t2"}, (), "is this host alone"),
    ],
)
def test_what_cannot_be_a_gang_is_refused(environment: dict[str, str], options: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        membership(environment, *options)


class Store:
    """The coordinator's key-value store, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        assert len(value) <= CHUNK
        with self._changed:
            assert key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self._changed:
            self.values[key] = value.encode()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, min(timeout_in_ms, 50) / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timed out")
            return self.values[key]

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: no such key")
        return self.values[key].decode()

    def key_value_delete(self, prefix: str) -> None:
        with self._changed:
            self.values = {key: value for key, value in self.values.items() if not key.startswith(prefix)}


def together(size: int, act: Callable[[Gang], Any], limit_s: float = 5.0) -> tuple[list[Any], Store]:
    """What `act` returns, or the exception, on every process of a gang of threads."""
    store, results = Store(), [None] * size

    def run(process: int) -> None:
        try:
            results[process] = act(Gang(process, size, limit_s, store))
        except (GangError, DataError, OSError, Stopped) as error:
            results[process] = error

    threads = [threading.Thread(target=run, args=(process,)) for process in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results, store


def test_everybody_gets_all_payloads_in_order_and_old_ones_are_dropped() -> None:
    def act(gang: Gang) -> list[list[bytes]]:
        payload = bytes([gang.process]) * (2 * CHUNK + gang.process)
        return [gang.exchange(part, "test") for part in (payload, b"", b"last")]

    results, store = together(3, act)
    assert results[0] == results[1] == results[2]
    assert [(part[0], len(part)) for part in results[0][0]] == [(p, 2 * CHUNK + p) for p in range(3)]
    assert results[0][1:] == [[b""] * 3, [b"last"] * 3]
    assert {key.split("/")[1] for key in store.values} == {"2"}


def test_a_process_that_does_not_come_is_named_in_time() -> None:
    began = time.monotonic()
    results, _ = together(3, lambda gang: gang.process == 1 or gang.exchange(b"x", "iteration 4"), limit_s=0.3)
    assert results[1] is True
    for error in (results[0], results[2]):
        assert str(error) == "iteration 4: process 1 of 3 did not come within 0.3 s"
    assert time.monotonic() - began < 5


def test_what_takes_longer_than_all_else_is_waited_for() -> None:
    def act(gang: Gang) -> tuple[str, float]:
        with gang.patient(5.0):
            found = gang.first(lambda: time.sleep(0.6) or "fetched", "run directory")
        with gang.patient(0.0):
            return found, gang.limit_s

    results, _ = together(2, act, limit_s=0.1)
    assert results == [("fetched", 0.1)] * 2


def test_a_failure_on_one_is_a_failure_on_all() -> None:
    def act(gang: Gang) -> bytes:
        def call() -> int:
            if gang.process == 1:
                raise DataError("no Java")
            return gang.process

        return gang.agree(call, "environment")

    results, _ = together(3, act)
    assert isinstance(results[1], DataError)
    assert [str(results[at]) for at in (0, 2)] == ["environment: process 1: no Java"] * 2


def test_a_stop_on_one_is_a_stop_on_all() -> None:
    def act(gang: Gang) -> Any:
        if gang.process == 2:
            gang.tell_stop()
            return gang.gather(stop, "rollout")
        return gang.gather(lambda: b"done", "rollout"), gang.told_stop()

    def stop() -> bytes:
        raise Stopped("asked")

    results, store = together(3, act)
    assert all(isinstance(result, Stopped) for result in results)
    assert Gang(0, 3, client=store).told_stop()


def test_the_first_runs_alone_and_all_have_its_value() -> None:
    ran = []

    def act(gang: Gang) -> Any:
        return gang.first(lambda: ran.append(gang.process) or {"step": 7}, "checkpoint")

    assert together(3, act)[0] == [{"step": 7}] * 3
    assert ran == [0]


def test_alone_nothing_is_exchanged() -> None:
    gang = current()
    assert (gang.process, gang.size, gang.writes, gang.told_stop()) == (0, 1, True, False)
    assert gang.exchange(b"x", "test") == [b"x"]
    assert gang.first(lambda: 3, "test") == gang.agree(lambda: 3, "test") == 3
    with pytest.raises(OSError, match="own"):
        gang.gather(lambda: (_ for _ in ()).throw(OSError("own")), "test")
    check_covers(make_mesh(jax.devices(), 1, 1, 1))
    tree = {"a": jax.numpy.arange(3)}
    assert own_copy(tree)["a"] is not tree["a"]
    np.testing.assert_array_equal(whole(tree["a"]), [0, 1, 2])


def failed_start(*options: str, run_dir: Any) -> subprocess.CompletedProcess[str]:
    done = empo2(*train_arguments(run_dir), "--num-processes", "2", "--start-timeout", "1", *options)
    assert done.returncode == EXIT_GANG
    assert not run_dir.exists()
    return done


def test_a_coordinator_that_does_not_answer_is_one_line(tmp_path: Any) -> None:
    with socket.socket() as bound:  # nobody listens there
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        done = failed_start("--coordinator", address, "--process-id", "1", run_dir=tmp_path / "run")
    assert done.stderr == (
        "error: process 1 of 2 (--coordinator --num-processes --process-id): "
        f"{address} does not answer within 1 s: Connection refused\n"
    )


def test_missing_processes_and_a_taken_port_are_one_line(tmp_path: Any) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
    done = failed_start("--coordinator", address, "--process-id", "0", run_dir=tmp_path / "run")
    assert done.stderr.splitlines()[-1].endswith("only a part of them came within 1 s")
    with socket.socket(socket.AF_INET6) as bound:
        bound.bind(("::", 0))
        bound.listen()
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        done = failed_start("--coordinator", address, "--process-id", "0", run_dir=tmp_path / "run")
    assert done.stderr.splitlines()[-1].endswith(f"cannot listen at {address}: Address already in use")
