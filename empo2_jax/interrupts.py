"""Ctrl-C where it would do harm: while a checkpoint is written, and while compiled modules are imported; SIGTERM."""

import signal
from collections.abc import Generator
from contextlib import contextmanager


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
