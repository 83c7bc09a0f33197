"""A thread beside the training loop: passes a stop on to all processes, and ends a process that makes no progress.

SIGTERM or Ctrl-C sets a flag; the loop looks at it where it can stop, so that the processes agree on where that is and
what is complete can be saved. A second Ctrl-C raises at once. A process
that shows no sign of life for `limit_s` seconds (a dead peer in a collective, a hanging simulator) prints the stacks of
its threads and exits with `EXIT_STUCK`: its launcher restarts the gang, and JAX alone would wait for ever.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from empo2_jax.distributed import Gang
from empo2_jax.errors import EngineError
from empo2_jax.interrupts import Stopped
from empo2_jax.progress import note
from empo2_jax.rollout.base import Completion, Engine, Measured, Request

EXIT_STUCK = 124
POLL_S = 0.5
STOPPING = "stopping: what is complete is saved, an update is finished before; Ctrl-C again ends at once"


class Watch:
    """Context manager around a run."""

    def __init__(self, gang: Gang, limit_s: float) -> None:
        """`limit_s` without a `beat` ends the process; 0 = never."""
        self._gang, self._limit = gang, limit_s
        self._asked, self._done = threading.Event(), threading.Event()
        self._last, self._doing = time.monotonic(), "start"
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)
        self._before: dict[signal.Signals, Any] = {}
        self.interrupted = False  # by Ctrl-C

    def __enter__(self) -> "Watch":
        """Begin to watch; the signals are answered from now on, in the main thread, unless they are ignored."""
        if threading.current_thread() is threading.main_thread():
            answers = {signal.SIGTERM: lambda number, frame: self.ask(), signal.SIGINT: self._interrupt}
            for number, answer in answers.items():
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, answer)
        self._gang.limit_s = self._limit or self._gang.limit_s
        self._last = time.monotonic()
        self._gang.waiting = lambda: self.beat(self._doing)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching."""
        self._done.set()
        try:
            self._thread.join()
        finally:
            for number, answer in self._before.items():
                signal.signal(number, answer)

    @property
    def asked(self) -> bool:
        """Whether this process knows that the run is to stop; others may not know yet."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Let the run stop as SIGTERM would; from any thread."""
        self._asked.set()

    def beat(self, doing: str) -> None:
        """Show progress."""
        self._last, self._doing = time.monotonic(), doing

    def check(self, doing: str) -> None:
        """Show progress; raises `Stopped` when the run is to stop."""
        self.beat(doing)
        if self.asked:
            raise Stopped("asked to stop")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            signal.default_int_handler(number, frame)
        self.interrupted = True
        self.ask()

    def _poll(self) -> None:
        told = False
        while not self._done.wait(POLL_S):
            if self._asked.is_set():
                if not told:
                    self._gang.tell_stop()
                    told = True
                    if self.interrupted:
                        with suppress(OSError, SystemExit):  # Ctrl-C has ended the reader of a pipe too
                            note(STOPPING)
            elif self._gang.told_stop():
                self._asked.set()
            idle = time.monotonic() - self._last
            if self._limit and idle > self._limit:
                self._end(idle)

    def _end(self, idle: float) -> None:
        where = f"process {self._gang.process} of {self._gang.size}"
        print(f"error: {where}: no progress for {idle:.0f} s in: {self._doing}; ended", file=sys.stderr)
        faulthandler.dump_traceback(file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_STUCK)


class WatchedEngine:
    """An engine whose every call shows progress, and that ends the collection when the run is to stop."""

    def __init__(self, engine: Engine, watch: Watch) -> None:
        self._engine, self._watch = engine, watch
        self.max_length, self.policy_version = engine.max_length, engine.policy_version

    def generate(self, requests: Sequence[Request]) -> Sequence[Completion | EngineError]:
        """As the engine; raises `Stopped`."""
        self._watch.check("rollout")
        return self._engine.generate(requests)

    def release(self, session: str) -> None:
        """As the engine."""
        self._engine.release(session)

    def load(self, params: Any, policy_version: int) -> None:
        """As the engine."""
        self._engine.load(params, policy_version)
        self.policy_version = policy_version

    def release_memory(self) -> None:
        """As the engine."""
        self._engine.release_memory()

    def close(self) -> None:
        """As the engine."""
        self._engine.close()

    def metrics(self) -> dict[str, float]:
        """Of the engine, if it has any."""
        return self._engine.metrics() if isinstance(self._engine, Measured) else {}
