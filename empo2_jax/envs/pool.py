"""A pool of simulators: started when needed, two at a time at most, reused over episodes, replaced when dead.

A simulator serves one environment at a time, from `lease` to `give_back`. There are never more of them than
environments open at once, and at most `size` wait idle. Where one after another fails and none works in between, the
pool stops starting them. What a simulator is does not matter here: see `Worker`.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from empo2_jax.errors import EnvError


@runtime_checkable
class Worker(Protocol):
    """A simulator process."""

    @property
    def usable(self) -> bool:
        """Whether it is alive and not worn out."""
        ...

    @property
    def resident_mb(self) -> float:
        """Memory of the process in MB; 0 where the system does not tell."""
        ...

    def kill(self) -> None:
        """End the process and release its handles; safe to call twice."""
        ...


class PoolFigures(NamedTuple):
    """The workers of a pool now, and what getting one has cost so far."""

    leased: int
    idle: int
    failed_in_a_row: int
    resident_mb: float  # of all workers
    largest_mb: float  # of one worker
    wait_s: float  # spent in `lease` by all callers together


W = TypeVar("W", bound=Worker)


class Pool(Generic[W]):
    """Thread-safe leases of workers made by `start`."""

    def __init__(
        self, start: Callable[[], W], size: int, concurrent_starts: int = 2, failures: int | None = None
    ) -> None:
        """`failures` in a row end the pool; None: four for each of `size`, but at least 16."""
        self._start = start
        self._failures = max(16, 4 * size) if failures is None else failures
        self._failed_in_a_row = 0
        self._last_failure = ""
        self._wait_s = 0.0
        self._size = size
        self._starts = threading.Semaphore(concurrent_starts)
        self._lock = threading.Lock()
        self._idle: list[W] = []
        self._leased: list[W] = []
        self._closed = False
        self._events: Counter[str] = Counter()

    @property
    def started(self) -> int:
        """Workers started so far; beyond the open environments it counts replacements."""
        return self.events["started"]

    @property
    def events(self) -> Counter[str]:
        """How often what happened: started, retired (dead or worn out), and what environments `note`."""
        with self._lock:
            return Counter(self._events)

    def note(self, event: str) -> None:
        """Count an event."""
        with self._lock:
            self._events[event] += 1

    def figures(self) -> PoolFigures:
        """How it is used now."""
        with self._lock:
            leased, idle = list(self._leased), list(self._idle)
            failed, wait_s = self._failed_in_a_row, self._wait_s
        resident = [worker.resident_mb for worker in leased + idle]
        return PoolFigures(len(leased), len(idle), failed, sum(resident), max(resident, default=0.0), wait_s)

    def fail(self, worker: W, why: str) -> None:
        """End the lease of a worker that died or hung."""
        worker.kill()
        self._failed(why)
        self.give_back(worker)

    def lease(self) -> W:
        """An idle worker, or a new one.

        Raises:
            EnvError: it cannot be started, the pool is closed, or too many failed one after another.
        """
        before = time.monotonic()
        try:
            return self._lease()
        finally:
            with self._lock:
                self._wait_s += time.monotonic() - before

    def _lease(self) -> W:
        while (worker := self._pop_idle()) is not None:
            if worker.usable:
                return worker
            self.give_back(worker)
        with self._starts:
            self._check()  # those that waited for their turn meanwhile saw others fail
            try:
                worker = self._start()
            except EnvError as error:
                self._failed(str(error))
                raise
        with self._lock:
            self._events["started"] += 1
            if not self._closed:
                self._leased.append(worker)
                return worker
        worker.kill()
        raise EnvError("the environment pool is closed: it cannot start another simulator")

    def give_back(self, worker: W) -> None:
        """End a lease; a dead or worn-out worker, or one too many, is killed."""
        with self._lock:
            if worker in self._leased:
                self._leased.remove(worker)
            usable = worker.usable
            keep = usable and len(self._idle) < self._size and not self._closed
            if not usable:
                self._events["retired"] += 1
            elif not self._closed:
                self._failed_in_a_row = 0
            if keep:
                self._idle.append(worker)
        if not keep:
            worker.kill()

    def close(self) -> None:
        """Kill every worker, leased ones too; safe to call twice."""
        with self._lock:
            self._closed = True
            workers = self._idle + self._leased
            self._idle, self._leased = [], []
        for worker in workers:
            worker.kill()

    def _failed(self, why: str) -> None:
        with self._lock:
            self._events["failed"] += 1
            self._failed_in_a_row += 1
            self._last_failure = why

    def _check(self) -> None:
        with self._lock:
            if self._failed_in_a_row >= self._failures:
                raise EnvError(
                    f"{self._failed_in_a_row} simulators failed one after another, so no more are started; "
                    f"the last one: {self._last_failure}"
                )

    def _pop_idle(self) -> W | None:
        with self._lock:
            if self._closed:
                raise EnvError("the environment pool is closed")
            if not self._idle:
                return None
            self._leased.append(self._idle.pop())
            return self._leased[-1]
