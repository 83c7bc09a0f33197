"""A folder of this process for what a simulator writes. One whose process was killed is removed by the next start.

Its owner holds a lock in it, which the kernel frees with the process, and which also counts between containers that
share a disk. A folder without a lock file is never touched.
"""

import fcntl
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

LOCK = ".owner"


class Scratch:
    """A new folder below the system's temporary one, for as long as this object and its process live."""

    def __init__(self, prefix: str) -> None:
        """Make it, after those of dead processes with the same prefix were removed."""
        sweep(prefix)
        while not self._made(prefix):  # a sweep came between the folder and its lock
            self._folder.cleanup()

    def _made(self, prefix: str) -> bool:
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        with suppress(FileNotFoundError):
            self._lock = (self.path / LOCK).open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (self.path / LOCK).exists():
                return True
            self._lock.close()
        return False

    def remove(self) -> None:
        """Remove it with all that is in it; safe to call twice."""
        self._folder.cleanup()
        self._lock.close()


def sweep(prefix: str) -> list[Path]:
    """Remove folders of dead processes; returns them."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError), (folder / LOCK).open("r+b") as lock:  # not there, of another user, or held
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed
