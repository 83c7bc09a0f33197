"""The processes of a soak: two rollout servers and a trainer that are killed, started again, and watched.

Kills are SIGKILL. Who starts what was killed is the part of a supervisor: a server comes back on its port with the
weights of its folder, a trainer with the command it had. One that ends on its own account is a fault of ours, and is
counted as such.
"""

import os
import socket
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from empo2_jax.bench.processes import children, command_line, descriptors, is_zombie, marked, own_bytes, peak_bytes
from empo2_jax.bench.soak_faults import Fault
from empo2_jax.metrics import METRICS_FILE

MARK = "EMPO2_SOAK"  # variable that all processes of a soak inherit
POLL_S, SAMPLE_S = 0.05, 1.0
ZOMBIE_S = 60.0  # a simulator that nobody needed since its death may be one for so long
END_S = 20.0  # for servers to end, and for others to be gone after them
PACE_S = 3.0  # what an iteration is taken to last before one was seen
LIMIT_S = 1500.0  # for all of it
MAX_EXITS = 3  # of programs on their own account
PORTS = range(20_000, 30_000)  # below those that the system gives to outgoing connections


class SoakError(Exception):
    """The soak could not go on; the message is one line."""


class Sample(NamedTuple):
    """A process at one moment."""

    episodes: int  # that the run had then
    memory: float  # bytes
    descriptors: int


@dataclass
class Kill:
    """A fault that was injected."""

    fault: Fault
    iteration: int  # that were complete then
    lost: bool = False


@dataclass
class Watched:
    """What was seen."""

    samples: dict[int, list[Sample]] = field(default_factory=lambda: defaultdict(list))  # by process id
    zombies: dict[int, float] = field(default_factory=dict)  # process id → since when
    stayed: set[int] = field(default_factory=set)  # that were zombies for longer than `ZOMBIE_S`
    simulator_bytes: float = 0.0  # most that one had
    left: list[int] = field(default_factory=list)  # processes that outlived the soak
    exits: list[str] = field(default_factory=list)  # last words of programs that ended on their own account


class Program:
    """A command that is started again and again, each time with a log of its own."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, mark: str) -> None:
        self.name = name
        self._command, self._folder, self._mark = list(command), folder, mark
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the newest process; 0 before the first."""
        return self._process.pid if self._process else 0

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    @property
    def log(self) -> Path:
        """What the newest process says."""
        return self._folder / f"{self.name}-{self._starts}.log"

    def said(self) -> str:
        """All of that."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def start(self) -> None:
        """Begin a new process."""
        self._starts += 1
        with self.log.open("wb") as log:
            environment = os.environ | {MARK: self._mark}
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def kill(self) -> None:
        """End it with SIGKILL; nothing if it has not begun."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        """End it in good order, or by force after `END_S`."""
        assert self._process is not None
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self.kill()


class Soak:
    """One run with its servers and its faults; a context manager that leaves no process behind."""

    def __init__(
        self,
        trainer: Sequence[str],
        servers: Sequence[Sequence[str]],
        run_dir: Path,
        faults: Sequence[Fault],
        episodes_per_iteration: int,
        draw: np.random.Generator,
    ) -> None:
        """Nothing is started yet.

        Args:
            trainer: Command that trains to the end of the run, or goes on with it.
            servers: Command of each server.
            run_dir: Of the run; its parent takes the logs.
            faults: In their order.
            episodes_per_iteration: For the samples.
            draw: Chooses among several victims.
        """
        self.watched, self.kills = Watched(), list[Kill]()
        self._mark = uuid.uuid4().hex
        logs = run_dir.parent / "logs"
        logs.mkdir(parents=True)
        self.trainer = Program("trainer", trainer, logs, self._mark)
        self.servers = [Program(f"server{n}", command, logs, self._mark) for n, command in enumerate(servers)]
        self._metrics = run_dir / METRICS_FILE
        self._faults, self._per_iteration, self._draw = list(faults), episodes_per_iteration, draw
        self._done, self._reached, self._paces = 0, 0.0, [PACE_S]
        self._sampled = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> "Soak":
        for program in (self.trainer, *self.servers):
            self._stack.callback(program.kill)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def run(self) -> None:
        """Train to the end under all faults, then end the servers.

        Raises:
            SoakError: it takes too long, or programs end on their own account again and again.
        """
        deadline = time.monotonic() + LIMIT_S
        for server in self.servers:
            server.start()
        self.trainer.start()
        self._reached = time.monotonic()
        while self.trainer.code != 0:
            if time.monotonic() > deadline:
                raise SoakError(f"not at its end within {LIMIT_S:g} s: iteration {self._done}; {_last(self.trainer)}")
            self._revive()
            self._count()
            self._inject()
            if time.monotonic() > self._sampled + SAMPLE_S:
                self._sample()
            time.sleep(POLL_S)
        self._count()
        for server in self.servers:
            server.end()
        deadline = time.monotonic() + END_S
        while (left := marked(MARK, self._mark)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.watched.left = left
        self.watched.stayed |= set(filter(is_zombie, children(os.getpid())))

    def _revive(self) -> None:
        """Start again what has ended on its own account; what was killed has been started at once."""
        for program in (self.trainer, *self.servers):
            if program.code is None or (program is self.trainer and program.code == 0):
                continue
            self.watched.exits.append(f"{program.name}: {_last(program)}")
            if self.kills:
                self.kills[-1].lost = True
            if len(self.watched.exits) > MAX_EXITS:
                raise SoakError("; ".join(self.watched.exits))
            program.start()

    def _count(self) -> None:
        done = self._metrics.read_bytes().count(b"\n") if self._metrics.is_file() else 0
        if done > self._done:
            now = time.monotonic()
            self._paces.append((now - self._reached) / (done - self._done))
            self._done, self._reached = done, now

    def _inject(self) -> None:
        """The next fault, if its place in the run is reached and there is a victim."""
        if not self._faults or self._done < self._faults[0].iteration:
            return
        fault = self._faults[0]
        early = self._done == fault.iteration and self._since() < fault.share * float(np.median(self._paces))
        victims = [] if early else self._victims(fault)
        if not victims:
            return
        victim = victims[int(self._draw.integers(len(victims)))]
        if isinstance(victim, Program):
            victim.kill()
            victim.start()
        else:
            with suppress(ProcessLookupError):
                os.kill(victim, 9)
        self.kills.append(Kill(self._faults.pop(0), self._done))

    def _since(self) -> float:
        """Seconds since the last complete iteration."""
        return time.monotonic() - self._reached

    def _victims(self, fault: Fault) -> list[Program] | list[int]:
        """Whom it may hit now; a server only once it serves, as it would not be missed before."""
        if fault.kind == "trainer":
            return [self.trainer]
        if fault.kind == "server":
            return [server for server in self.servers if "serving http" in server.said()]
        return self._simulators()

    def _simulators(self) -> list[int]:
        return [pid for pid in children(self.trainer.pid) if "py4j.GatewayServer" in command_line(pid)]

    def _sample(self) -> None:
        now = self._sampled = time.monotonic()
        mine = (self.trainer, *self.servers)
        for program in mine:
            with suppress(OSError):
                found = Sample(self._done * self._per_iteration, own_bytes(program.pid), descriptors(program.pid))
                self.watched.samples[program.pid].append(found)
        for pid in self._simulators():
            with suppress(OSError):
                self.watched.simulator_bytes = max(self.watched.simulator_bytes, peak_bytes(pid))
        dead = {pid for program in mine for pid in children(program.pid) if is_zombie(pid)}
        self.watched.zombies = {pid: self.watched.zombies.get(pid, now) for pid in dead}
        self.watched.stayed |= {pid for pid, since in self.watched.zombies.items() if now - since > ZOMBIE_S}


def free_port() -> int:
    """A port of this machine that nobody has, and that stays free while its server is down."""
    for port in np.random.default_rng().permutation(PORTS):
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", int(port)))
            return int(port)
    raise SoakError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")


def empo2(*arguments: str) -> list[str]:
    """The `empo2` command, of this installation."""
    return [sys.executable, "-m", "empo2_jax", *arguments]


def _last(program: Program) -> str:
    lines = [line for line in program.said().splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {program.code}"
