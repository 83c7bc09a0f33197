"""A pool of simulators: started when needed, two at a time at most, reused over episodes, replaced when dead.

A simulator serves one environment at a time, from `lease` to `give_back`. There are never more of them than
environments open at once, and at most `size` wait idle. What a simulator is does not matter here: see `Worker`.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, runtime_checkable

from empo2_jax.errors import EnvError


@runtime_checkable
class Worker(Protocol):
    """A simulator process."""

    @property
    def usable(self) -> bool:
        """Whether it is alive and not worn out."""
        ...

    def kill(self) -> None:
        """End the process and release its handles; safe to call twice."""
        ...


W = TypeVar("W", bound=Worker)


class Pool(Generic[W]):
    """Thread-safe leases of workers made by `start`."""

    def __init__(self, start: Callable[[], W], size: int, concurrent_starts: int = 2) -> None:
        self._start = start
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

    def lease(self) -> W:
        """An idle worker, or a new one. Raises `EnvError` when it cannot be started or the pool is closed."""
        while (worker := self._pop_idle()) is not None:
            if worker.usable:
                return worker
            self.give_back(worker)
        with self._starts:
            worker = self._start()
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

    def _pop_idle(self) -> W | None:
        with self._lock:
            if self._closed:
                raise EnvError("the environment pool is closed")
            if not self._idle:
                return None
            self._leased.append(self._idle.pop())
            return self._leased[-1]
