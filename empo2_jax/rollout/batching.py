"""Continuous batching: one thread that owns an engine and lets jobs join and leave between bursts of tokens.

Everything that touches the engine is a message to that thread, carried out between two bursts: new jobs, aborts,
pauses, new weights. Waiting jobs are admitted in their order, as many together as there are free slots, so that prompts
that share a prefix are computed once. A paused thread takes messages only.

Not here: HTTP (`http_api.py`), what an engine computes (`stepwise.py`).
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal

from empo2_jax.errors import Empo2Error, EngineError
from empo2_jax.rollout.base import MemoryPart
from empo2_jax.rollout.stepwise import Job, StepEngine

PauseMode = Literal["abort", "retract", "in_place"]
Selector = Callable[[str], bool]


@dataclass(eq=False)
class Ticket:
    """A job in the hands of the thread."""

    rid: str
    job: Job
    future: "Future[Job]" = field(default_factory=Future)


@dataclass
class _Command:
    """Something to do between two bursts."""

    call: Callable[[], Any]
    when_idle: bool
    future: "Future[Any]" = field(default_factory=Future)


@dataclass
class Counts:
    """What the thread has done since it started; read by others at any time."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    retracted: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # jobs by finish
    tokens_per_s: float = 0.0  # of the last burst, with the prompts that joined before it


class Batcher:
    """Runs jobs on an engine; every method may be called from any thread."""

    def __init__(self, engine: StepEngine, *, burst: int):
        """Start the thread.

        Args:
            engine: Touched by the thread alone from now on, except for its `check`.
            burst: Tokens between two moments at which jobs can join or leave.
        """
        self.counts = Counts()
        self.failure: MemoryError | RuntimeError | None = None  # of the engine or a call; it ended the thread
        self._engine, self._burst = engine, burst
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._arriving: dict[str, Ticket] = {}  # of all unfinished jobs, by rid
        self._guard = threading.Lock()  # over `_arriving`, `_ended` and what is put into the inbox
        self._ended = False
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []
        self._commands: deque[_Command] = deque()
        self._paused = False
        self._released: set[MemoryPart] = set()  # what was given back
        self._deadline: float | None = None  # of an ending thread, time.monotonic
        self._thread = threading.Thread(target=self._serve, name="batcher", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread takes jobs; it does not any more when those that it had learn of its end."""
        return not self._ended

    @property
    def running(self) -> int:
        """Jobs in slots."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Jobs without a slot."""
        return max(0, len(self._arriving) - len(self._running))

    @property
    def free_slots(self) -> int:
        """Slots without a job."""
        return self._engine.free_slots

    @property
    def paused(self) -> bool:
        """Whether jobs stand still."""
        return self._paused

    @property
    def released(self) -> list[MemoryPart]:
        """Memory that was given back; no job is taken while there is any."""
        return sorted(self._released)

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue jobs; their futures give them back finished.

        Raises:
            EngineError: a rid is in use, a request can never be served, or the thread is ending. Nothing is queued
                then.
        """
        for ticket in tickets:
            self._engine.check(ticket.job.request)
        with self._guard:
            if self._deadline is not None or self._ended:
                raise EngineError("the engine is shutting down")
            if self._released:
                raise EngineError(f"the memory of {', '.join(self.released)} was given back and must be resumed first")
            taken = [ticket.rid for ticket in tickets if ticket.rid in self._arriving]
            if taken or len({ticket.rid for ticket in tickets}) < len(tickets):
                raise EngineError(f"rid {(taken or [tickets[0].rid])[0]!r} is in use; every request needs its own")
            for ticket in tickets:
                ticket.future.set_running_or_notify_cancel()  # from here on nobody can cancel it
                self._arriving[ticket.rid] = ticket
            self._inbox.put(lambda: self._waiting.extend(tickets))

    def call(self, function: Callable[[], Any], *, when_idle: bool = False) -> "Future[Any]":
        """Have the thread call `function` between two bursts.

        Args:
            function: Its result or Empo2Error goes into the future; any other error ends the thread, and the future
                has an EngineError then.
            when_idle: Only once no job runs; no job is admitted before. A paused thread calls it at once.
        """
        command = _Command(function, when_idle)
        command.future.set_running_or_notify_cancel()
        with self._guard:
            if self._ended:
                raise EngineError("the engine has stopped")
            self._inbox.put(lambda: self._commands.append(command))
        return command.future

    def abort(self, chosen: Selector) -> None:
        """Finish the jobs whose rid is chosen with what they have."""
        self._inbox.put(lambda: self._abort(chosen))

    def pause(self, mode: PauseMode) -> "Future[None]":
        """Stand still: jobs end (abort), go back to the queue (retract) or keep their slots (in_place)."""
        return self.call(lambda: self._pause(mode))

    def resume(self) -> "Future[None]":
        """Go on."""
        return self.call(self._resume)

    def flush(self) -> "Future[None]":
        """Forget cached prefixes; EngineError while jobs hold slots."""
        return self.call(self._flush)

    def release_memory(self, parts: Collection[MemoryPart]) -> "Future[None]":
        """Give device memory back and take no more jobs; EngineError while there are some."""
        return self.call(lambda: self._release_memory(parts))

    def resume_memory(self, parts: Collection[MemoryPart]) -> "Future[None]":
        """Take jobs again once all parts were resumed; weights that were given back must be loaded before."""
        return self.call(lambda: self._released.difference_update(parts))

    def close(self, grace_s: float) -> None:
        """Take no more jobs, finish those there are within a time, abort the rest, end the thread; returns at once."""
        with self._guard:
            self._deadline = time.monotonic() + grace_s
        self._inbox.put(lambda: None)  # wakes it

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        except (MemoryError, RuntimeError) as error:
            self.failure = error
        finally:  # also after an error of the engine, which nobody else would notice
            with self._guard:
                self._ended = True
                left = list(self._arriving.values())
                self._arriving.clear()
                while not self._inbox.empty():
                    self._inbox.get()()
            error = EngineError("the engine has stopped")
            for future in [entry.future for entry in (*left, *self._commands) if not entry.future.done()]:
                future.set_exception(error)

    def _turn(self) -> bool:
        """Messages, then one burst; False at the end."""
        self._take_messages(block=not (self._can_run() or self._runnable_command()))
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._abort(lambda rid: True)
        while command := self._runnable_command():
            self._carry_out(command)
            self._commands.popleft()  # after an error that ends the thread it is still there, and learns of the end
        if self._can_run():
            self._run()
        return self._deadline is None or bool(self._running or self._waiting or self._commands)

    def _take_messages(self, block: bool) -> None:
        wait_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            self._inbox.get(block, wait_s)()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return

    def _can_run(self) -> bool:
        return not self._paused and bool(self._running or self._waiting)

    def _runnable_command(self) -> _Command | None:
        """The first command, if its time has come: commands keep their order."""
        if not self._commands or (self._commands[0].when_idle and self._running and not self._paused):
            return None
        return self._commands[0]

    def _carry_out(self, command: _Command) -> None:
        try:
            command.future.set_result(command.call())
        except Empo2Error as error:
            command.future.set_exception(error)

    def _run(self) -> None:
        """Admit what fits, unless a command waits for silence, and decode one burst."""
        start, before = time.monotonic(), sum(len(ticket.job.ids) for ticket in self._running)
        free = 0 if self._commands else min(self._engine.free_slots, len(self._waiting))
        joining = [self._waiting.popleft() for _ in range(free)]
        known = sum(len(ticket.job.ids) for ticket in joining)
        new = [ticket for ticket in joining if not ticket.job.ids]
        self._running += joining
        self._engine.admit([ticket.job for ticket in joining])
        self.counts.prompt_tokens += sum(len(ticket.job.request.prompt_ids) for ticket in new)
        self.counts.cached_tokens += sum(ticket.job.cached_tokens for ticket in new)
        self._engine.decode(self._burst)
        sampled = sum(len(ticket.job.ids) for ticket in self._running) - before - known
        self.counts.sampled_tokens += sampled
        self.counts.tokens_per_s = sampled / max(1e-9, time.monotonic() - start)
        ended = [ticket for ticket in self._running if ticket.job.finish]
        self._running = [ticket for ticket in self._running if not ticket.job.finish]
        self._give_back(ended)

    def _give_back(self, tickets: Sequence[Ticket]) -> None:
        """Hand finished jobs to whoever waits for them."""
        with self._guard:
            for ticket in tickets:
                del self._arriving[ticket.rid]
        for ticket in tickets:
            self.counts.finished[str(ticket.job.finish)] += 1
            ticket.future.set_result(ticket.job)

    def _abort(self, chosen: Selector) -> None:
        ended = [ticket for ticket in (*self._running, *self._waiting) if chosen(ticket.rid)]
        for ticket in ended:
            self._engine.withdraw(ticket.job)
            ticket.job.finish = "abort"
        self._running = [ticket for ticket in self._running if ticket not in ended]
        self._waiting = deque(ticket for ticket in self._waiting if ticket not in ended)
        self._give_back(ended)

    def _pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            self._abort(lambda rid: True)
        if mode == "retract":
            for ticket in self._running:
                self._engine.withdraw(ticket.job)
            self._waiting.extendleft(reversed(self._running))
            self.counts.retracted += len(self._running)
            self._running = []
        self._paused = True

    def _resume(self) -> None:
        self._paused = False

    def _release_memory(self, parts: Collection[MemoryPart]) -> None:
        with self._guard:
            if self._arriving:
                raise EngineError(f"{len(self._arriving)} requests are there; memory can be given back when none is")
            self._released.update(parts)
        self._engine.release_memory(parts)

    def _flush(self) -> None:
        if self._running:
            raise EngineError(f"{len(self._running)} requests run; the cache can be flushed when none does")
        self._engine.flush()
