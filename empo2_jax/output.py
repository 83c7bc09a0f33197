"""Standard output and standard error that cannot be written: the disk is full, or the reader has gone."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def output_written() -> Generator[None, None, None]:
    """All that the block prints is written at its end.

    Raises:
        OSError: it cannot be written; the file name is "standard output", and nothing is tried again.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        try:
            print(flush=True)  # whether it is standard output that failed: then it fails again
        except OSError:
            to_nowhere(sys.stdout)
            raise OSError(error.errno, error.strerror, "standard output") from None
        raise


def to_nowhere(stream: TextIO) -> None:
    """All that is written to it from now on, and all that it still holds, vanishes."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
