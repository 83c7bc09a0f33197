"""Many episodes in flight from asyncio, over the environments of any family.

An environment blocks while its world thinks; here each call runs in a thread, has a deadline and can be canceled at any
time. At most `most` episodes hold an environment at once, later ones wait their turn. A call that is late or canceled
closes its environment, which ends the simulator behind it (`pool`), and no other episode notices.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np

from empo2_jax.envs.base import Environment, EnvironmentFamily
from empo2_jax.errors import EnvError
from empo2_jax.types import Observation, Task

KEPT = 10_000  # newest durations that figures are made from
T = TypeVar("T")


class Figures(NamedTuple):
    """What happened so far; seconds are 0 where nothing was timed."""

    episodes: int  # begun
    steps: int  # answered
    late: int  # calls past their deadline
    step_p50: float
    step_p95: float
    wait_p95: float  # for an environment


class InFlight:
    """Environments for coroutines of one event loop."""

    def __init__(self, family: EnvironmentFamily, most: int, timeout_s: float = 120.0) -> None:
        """`timeout_s` is the deadline of a call, a replay in a new simulator included; `family` stays the caller's."""
        self._family = family
        self._timeout_s = timeout_s
        self._turn = asyncio.Semaphore(most)
        # A call that is being ended may still hold its thread when the next episode begins.
        self._threads = ThreadPoolExecutor(2 * most, thread_name_prefix="in-flight")
        self._events: Counter[str] = Counter()
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._waits: deque[float] = deque(maxlen=KEPT)

    @asynccontextmanager
    async def episode(self) -> AsyncGenerator["Flight", None]:
        """An environment until the block ends, however it ends."""
        before = time.perf_counter()
        async with self._turn:
            self._waits.append(time.perf_counter() - before)
            self._events["episodes"] += 1
            environment = self._family.make()
            try:
                yield Flight(self, environment)
            finally:
                await asyncio.wait({self._end(environment)}, timeout=self._timeout_s)

    def figures(self) -> Figures:
        """What happened so far."""
        steps, waits = list(self._steps) or [0.0], list(self._waits) or [0.0]
        return Figures(
            self._events["episodes"],
            self._events["steps"],
            self._events["late"],
            float(np.percentile(steps, 50)),
            float(np.percentile(steps, 95)),
            float(np.percentile(waits, 95)),
        )

    def close(self) -> None:
        """End the threads, once the calls in them have come back."""
        self._threads.shutdown()

    async def call(self, environment: Environment, work: Callable[[], T], timeout_s: float | None) -> T:
        """`work` on `environment` in a thread; raises `EnvError` when it is late."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.wait_for(asyncio.shield(running), limit)
        except TimeoutError:
            self._events["late"] += 1
            running.cancel()  # of effect where it has not begun: no world may be opened after its end
            self._end(environment)
            raise EnvError(f"{self._family.name}: no answer within {limit:g} s") from None
        except asyncio.CancelledError:
            running.cancel()
            self._end(environment)
            raise
        finally:
            running.add_done_callback(_seen)

    def _end(self, environment: Environment) -> "asyncio.Future[None]":
        """Close it in a thread: a world that hangs must not stop the others."""
        ending = asyncio.get_running_loop().run_in_executor(self._threads, environment.close)
        ending.add_done_callback(_seen)
        return ending

    async def step(self, environment: Environment, action: str, timeout_s: float | None) -> Observation:
        """A timed step."""
        before = time.perf_counter()
        observation = await self.call(environment, lambda: environment.step(action), timeout_s)
        self._steps.append(time.perf_counter() - before)
        self._events["steps"] += 1
        return observation


class Flight:
    """One environment whose calls are awaited; `timeout_s` replaces the deadline of one call."""

    def __init__(self, owner: InFlight, environment: Environment) -> None:
        self._owner, self._environment = owner, environment

    @property
    def goal(self) -> str:
        """Task description of the current episode."""
        return self._environment.goal

    async def reset(self, task: Task, seed: int, timeout_s: float | None = None) -> Observation:
        """Start an episode of `task`."""
        return await self._owner.call(self._environment, lambda: self._environment.reset(task, seed), timeout_s)

    async def step(self, action: str, timeout_s: float | None = None) -> Observation:
        """Resolve and apply free text."""
        return await self._owner.step(self._environment, action, timeout_s)

    async def admissible_actions(self, timeout_s: float | None = None) -> Sequence[str]:
        """All actions that the world would accept now."""
        return await self._owner.call(self._environment, self._environment.admissible_actions, timeout_s)


def _seen(running: "asyncio.Future[Any]") -> None:
    """Take the error of a call that nobody waits for any more; otherwise asyncio reports it as lost."""
    if not running.cancelled():
        running.exception()
