"""What ends a run from outside, Ctrl-C and SIGTERM: the exceptions they raise, and where they have to wait."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


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
