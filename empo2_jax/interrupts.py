"""What ends a run from outside, Ctrl-C and SIGTERM: the exceptions they raise, and where they have to wait."""

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(Exception):
    """The run was asked to stop (SIGTERM) and has; not an error. Ctrl-C raises `KeyboardInterrupt`."""


@contextmanager
def uninterrupted() -> Generator[None, None, None]:
    """Ctrl-C and SIGTERM wait for the end of the block: threads and half-imported modules answer with tracebacks."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    answers = {number: answer for number in numbers if callable(answer := signal.getsignal(number))}
    came: list[tuple[int, FrameType | None]] = []
    try:
        for number in answers:
            signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield
    finally:
        for number, answer in answers.items():
            signal.signal(number, answer)
    for number, frame in came:
        answers[signal.Signals(number)](number, frame)


@contextmanager
def ended_at_once() -> Generator[None, None, None]:
    """Ctrl-C and SIGTERM end the process with one line; for a block that leaves nothing behind.

    The interpreter's own end is left out: while the compiler's threads still run, it ends in a crash.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        print("interrupted" if number == signal.SIGINT else "stopped", file=sys.stderr, flush=True)
        os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: answer for number, answer in before.items() if answer != signal.SIG_IGN}  # that stays so
    try:
        for number in before:
            signal.signal(number, end)
        yield
    finally:
        for number, answer in before.items():
            signal.signal(number, answer)


@contextmanager
def no_interrupt_lost() -> Generator[None, None, None]:
    """Send a signal again when it struck in a callback of the garbage collector, where Python drops the exception."""
    before, numbers = sys.unraisablehook, {KeyboardInterrupt: signal.SIGINT, Stopped: signal.SIGTERM}

    def hook(dropped: Any) -> None:
        if dropped.exc_type in numbers:
            threading.Timer(0.05, os.kill, (os.getpid(), numbers[dropped.exc_type])).start()
        else:
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def stopped_by_sigterm(text: str) -> Generator[None, None, None]:
    """SIGTERM raises `Stopped(text)` inside the block, as Ctrl-C raises; nothing changes outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(text)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
