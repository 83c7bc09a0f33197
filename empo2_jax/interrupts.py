"""Ctrl-C where it would do harm: while a checkpoint is written, and while compiled modules are imported; SIGTERM."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Stopped(Exception):
    """The run was asked to stop (SIGTERM) and has; not an error."""


@contextmanager
def uninterrupted() -> Generator[None, None, None]:
    """Ctrl-C waits for the end of the block: threads and half-imported modules answer it with tracebacks."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or someone else's
        yield
        return
    pressed = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


@contextmanager
def stopped_by_sigterm(text: str) -> Generator[None, None, None]:
    """SIGTERM raises `Stopped(text)` inside the block, as Ctrl-C raises; for the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(text)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
