"""Many processes as one run: who takes part, how they start, and how they exchange bytes and failures, all timed.

Training is one program on all processes (`jax.distributed`); what is not device arithmetic goes over the coordinator's
key-value store, so that a process that is missing is named instead of waited for. Process 0 is the only writer of the
run directory, which all processes see, but for `rollouts/` (rollout/journal.py). Without any of this there is one
process, and nothing here does anything.

Not here: restarting (launch/supervise.py), the share of the episodes (rollout/spread.py), signals (watch.py).
"""

import ipaddress
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed as jax_distributed  # the client has no public name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from empo2_jax.errors import ConfigError, Empo2Error, GangError
from empo2_jax.interrupts import Stopped

PORT = 8476  # of the coordinator where nothing else names one
CHUNK = 1 << 20  # bytes of a value in the key-value store; its messages are limited to 4 MiB
HEARTBEAT_S = 30  # after which the others learn that a process died
SHUTDOWN_S = 20
EXIT_GANG = 75  # another process failed or is missing: trying again may help (EX_TEMPFAIL)
AUTO = "auto"  # coordinator that JAX finds out itself (Cloud TPU)
STOP_KEY = "empo2/stop"
T = TypeVar("T")


@dataclass(frozen=True)
class Membership:
    """One process of a gang; `source` says where that was read."""

    coordinator: str  # host:port of process 0
    processes: int
    process: int
    source: str


def membership(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
) -> Membership | None:
    """Who this process is: the arguments, else EMPO2_*, Slurm or TPU variables; None when it is alone.

    Args:
        environment: `os.environ`.
        coordinator: HOST:PORT, or `auto`: JAX asks the platform (Cloud TPU VMs).
        processes: Of the gang.
        process: Number of this one, from 0.

    Raises:
        ConfigError: a part is missing, is no number or cannot be.
    """
    if coordinator == AUTO:
        return Membership(AUTO, 0, 0, f"--coordinator {AUTO}")
    options = {"--coordinator": coordinator, "--num-processes": processes, "--process-id": process}
    if given := [name for name, value in options.items() if value is not None]:
        found = Membership(coordinator or "", _known(processes), _known(process), " ".join(given))
        missing = [name for name, value in options.items() if value is None]
        if missing:
            raise ConfigError(f"{' and '.join(given)} without {' and '.join(missing)}: all three belong together")
    elif "EMPO2_COORDINATOR" in environment:
        number = "EMPO2_PROCESS_ID" if "EMPO2_PROCESS_ID" in environment else "JOB_COMPLETION_INDEX"
        found = Membership(
            environment["EMPO2_COORDINATOR"],
            _number(environment, "EMPO2_NUM_PROCESSES"),
            _number(environment, number),
            "EMPO2_COORDINATOR",
        )
    elif "SLURM_PROCID" in environment and _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        # Any port that two jobs on one host hardly share.
        port = 61440 + _number(environment, "SLURM_JOB_ID") % 4096
        host = _first_host(environment.get("SLURM_STEP_NODELIST", ""))
        found = Membership(
            f"{host}:{port}",
            _number(environment, "SLURM_STEP_NUM_TASKS"),
            _number(environment, "SLURM_PROCID"),
            "Slurm",
        )
        if _number(environment, "SLURM_STEP_NUM_NODES", 1) > 1:
            _refuse_loopback(found)
    elif "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        hosts = environment["TPU_WORKER_HOSTNAMES"].split(",")
        found = Membership(f"{hosts[0]}:{PORT}", len(hosts), _number(environment, "TPU_WORKER_ID"), "TPU")
        _refuse_loopback(found)
    else:
        return None
    if not re.fullmatch(r"\S+:\d+", found.coordinator):
        raise ConfigError(f"{found.source}: coordinator {found.coordinator!r}: HOST:PORT is allowed")
    if found.processes < 1 or not 0 <= found.process < found.processes:
        raise ConfigError(
            f"{found.source}: process {found.process} of {found.processes}: 0 to the number of processes less 1"
        )
    return found if found.processes > 1 else None


def _known(value: int | None) -> int:
    return -1 if value is None else value


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r}: a number is needed to start several processes")
    return int(text)


def _first_host(nodes: str) -> str:
    """First name of a Slurm list: `n[03-05,9],m1` is n03 first."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST = {nodes!r}: no host; start the processes with srun")
    return match[1] + (match[2] or "")


def _refuse_loopback(found: Membership) -> None:
    host = found.coordinator.rpartition(":")[0].strip("[]")
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if local:
        raise ConfigError(
            f"{found.source}: coordinator {found.coordinator} is this host alone; name one that all reach"
        )


class Gang:
    """The processes of this run. Every method is called by all of them, in the same order."""

    def __init__(self, process: int = 0, size: int = 1, limit_s: float = 1800.0, client: Any = None):
        """`limit_s` is how long the others are waited for; `client` is the key-value store."""
        self.process, self.size, self.limit_s = process, size, limit_s
        self.waiting: Callable[[], None] = lambda: None  # called once a second while this process waits
        self._client, self._count = client, 0

    @property
    def writes(self) -> bool:
        """Whether this process writes the run directory."""
        return self.process == 0

    @contextmanager
    def patient(self, limit_s: float) -> Generator[None, None, None]:
        """Wait for the others at least so long, where one does what may take longer than all else."""
        before, self.limit_s = self.limit_s, max(self.limit_s, limit_s)
        try:
            yield
        finally:
            self.limit_s = before

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Everybody's payload, in the order of the processes; `what` is said when one does not come.

        Raises:
            GangError: a process did not come within the limit, or the coordinator is gone.
        """
        if self.size == 1:
            return [payload]
        number, self._count = self._count, self._count + 1
        parts = [payload[at : at + CHUNK] for at in range(0, len(payload), CHUNK)]
        deadline = time.monotonic() + self.limit_s
        try:
            for index, part in enumerate(parts):
                self._client.key_value_set_bytes(f"empo2/{number}/{self.process}/{index}", part)
            self._client.key_value_set_bytes(f"empo2/{number}/{self.process}/parts", str(len(parts)).encode())
            payloads = [self._receive(number, other, deadline, what) for other in range(self.size)]
            if number:  # who posted to this exchange has read the one before
                self._client.key_value_delete(f"empo2/{number - 1}/{self.process}/")
        except jax.errors.JaxRuntimeError as error:
            raise GangError(f"{what}: the other processes cannot be reached: {str(error).splitlines()[0]}") from None
        return payloads

    def _receive(self, number: int, other: int, deadline: float, what: str) -> bytes:
        prefix = f"empo2/{number}/{other}"
        while True:
            try:
                parts = int(self._client.blocking_key_value_get_bytes(f"{prefix}/parts", 1000))
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                self.waiting()
                if time.monotonic() > deadline:
                    raise GangError(
                        f"{what}: process {other} of {self.size} did not come within {self.limit_s:g} s"
                    ) from None
        return b"".join(
            self._client.blocking_key_value_get_bytes(f"{prefix}/{index}", 60_000) for index in range(parts)
        )

    def gather(self, call: Callable[[], bytes], what: str) -> list[bytes]:
        """What `call` returns on every process; when it fails on one, all raise.

        Raises:
            Stopped: one was asked to stop.
            GangError: one failed; the process itself raises its own error.
        """
        if self.size == 1:
            return [call()]
        failure: Exception | None = None
        try:
            message = b"+" + call()
        except Stopped as stop:
            message, failure = b"." + str(stop).encode(), stop
        except (Empo2Error, OSError, ValueError) as error:
            message, failure = b"-" + str(error).encode(), error
        messages = self.exchange(message, what)
        if isinstance(failure, Empo2Error | OSError | ValueError):
            raise failure
        for other, text in enumerate(messages):
            if text.startswith(b"-"):
                raise GangError(f"{what}: process {other}: {text[1:].decode()}")
        if failure or any(text.startswith(b".") for text in messages):
            raise failure or Stopped("another process was asked to stop")
        return [text[1:] for text in messages]

    def agree(self, call: Callable[[], T], what: str) -> T:
        """What `call` returns here, once it has succeeded on all; raises as `gather`."""
        found: list[T] = []

        def run() -> bytes:
            found.append(call())
            return b""

        self.gather(run, what)
        return found[0]

    def first(self, call: Callable[[], T], what: str) -> T:
        """What `call` returns on process 0, the only one that runs it (JSON values); raises as `gather`."""
        if self.size == 1:
            return call()
        values = self.gather(lambda: json.dumps(call()).encode() if self.writes else b"null", what)
        return json.loads(values[0])

    def tell_stop(self) -> None:
        """Let every process know that this one was asked to stop; from any thread."""
        if self.size > 1:
            self._client.key_value_set(STOP_KEY, str(self.process), allow_overwrite=True)

    def told_stop(self) -> bool:
        """Whether any process was asked to stop; from any thread."""
        if self.size == 1:
            return False
        try:
            self._client.key_value_try_get(STOP_KEY)
        except jax.errors.JaxRuntimeError:  # not there, or the coordinator is gone, which an exchange will say
            return False
        return True


_gang = Gang()


def current() -> Gang:
    """The gang of this process: one for its whole life, as for `jax.process_index`."""
    return _gang


def initialize(found: Membership | None, *, limit_s: float = 600.0) -> Gang:
    """Join the other processes; before anything asks for a device.

    Args:
        found: Who this process is; None: alone, nothing happens.
        limit_s: How long to wait for the others.

    Raises:
        GangError: the coordinator does not answer or cannot start, with the reason. When others are missing the
            process ends with `EXIT_GANG`: JAX aborts there, and no exception gets out.
    """
    global _gang
    if found is None:
        return _gang
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM over from `watch`
    where = f"process {found.process} of {found.processes} ({found.source})"
    began = time.monotonic()
    if found.coordinator != AUTO:
        if found.process:
            _reach(found.coordinator, limit_s, where)
        else:
            _check_port(found.coordinator, where)
    last = threading.Timer(
        limit_s - (time.monotonic() - began), _give_up, (f"{where}: only a part of them came", limit_s)
    )
    last.daemon = True
    last.start()
    auto = found.coordinator == AUTO
    try:
        jax.distributed.initialize(
            None if auto else found.coordinator,
            None if auto else found.processes,
            None if auto else found.process,
            cluster_detection_method=None if auto else "deactivate",
            initialization_timeout=int(limit_s) + 60,  # `last` is first
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except (RuntimeError, ValueError) as error:
        raise GangError(f"{where}: no gang at {found.coordinator}: {str(error).splitlines()[0]}") from None
    finally:
        last.cancel()
    state = jax_distributed.global_state
    _gang = Gang(state.process_id, state.num_processes, client=state.client)
    return _gang


def _reach(coordinator: str, limit_s: float, where: str) -> None:
    """Wait until the coordinator accepts connections."""
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise GangError(
                    f"{where}: {coordinator} does not answer within {limit_s:g} s: {error.strerror or error}"
                ) from None
        time.sleep(0.2)


def _check_port(coordinator: str, where: str) -> None:
    """Refuse a port that is taken: JAX may crash there instead of raising."""
    port = int(coordinator.rpartition(":")[2])
    family, any_address = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((any_address, port))
        except OSError as error:
            raise GangError(f"{where}: cannot listen at {coordinator}: {error.strerror}") from None


def _give_up(what: str, limit_s: float) -> None:
    print(f"error: {what} within {limit_s:g} s", file=sys.stderr, flush=True)
    os._exit(EXIT_GANG)


def check_covers(mesh: Mesh) -> None:
    """Raise `ConfigError` unless a mesh of several processes has all devices of all of them."""
    if mesh.devices.size != jax.device_count() and jax.process_count() > 1:
        shape = list(mesh.devices.shape)
        raise ConfigError(
            f"model.mesh = {shape} has {mesh.devices.size} devices; the {jax.process_count()} processes have "
            f"{jax.device_count()}, and all must take part"
        )


def whole(array: Any) -> np.ndarray:
    """All of an array, wherever its parts are; called by all processes."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(_replicated(array))


def copy(tree: Any) -> Any:
    """A copy that lies as the original; called by all processes."""
    return jax.tree.map(lambda leaf: leaf.copy(), tree)


def own_copy(tree: Any) -> Any:
    """A copy for this process alone: as placed if there is one process, else whole on its first device."""
    if jax.process_count() == 1:
        return copy(tree)
    # One leaf at a time: a replica of all of them on every device would not fit.
    return jax.tree.map(lambda leaf: _replicated(leaf).addressable_data(0).copy(), tree)


def _replicated(array: jax.Array) -> jax.Array:
    assert isinstance(array.sharding, NamedSharding)
    return jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(array.sharding.mesh, PartitionSpec()))(array)
