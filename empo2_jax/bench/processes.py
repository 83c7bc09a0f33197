"""What Linux says of running processes (`/proc`): children, CPU seconds, memory, descriptors, zombies.

Unless said otherwise, a process that is gone raises `OSError`: FileNotFoundError or ProcessLookupError.
"""

import os
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage


def children(pid: int) -> list[int]:
    """Ids of a process's children, zombies included; none if it is gone."""
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text(encoding="ascii").split())
    return found


def children_cpu() -> float:
    """CPU seconds of this process's children, those that have ended included."""
    ended = getrusage(RUSAGE_CHILDREN)
    running = 0.0
    for pid in children(os.getpid()):
        with suppress(OSError):
            running += cpu_seconds(pid)
    return ended.ru_utime + ended.ru_stime + running


def cpu_seconds(pid: int) -> float:
    """What a process that was not waited for has used, in user and in system mode."""
    values = _stat(pid)
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def is_zombie(pid: int) -> bool:
    """Whether a process has ended and nobody has asked how; False if it is gone altogether."""
    try:
        return _stat(pid)[0] == "Z"
    except OSError:
        return False


def peak_bytes(pid: int) -> float:
    """Most memory that it had at a time."""
    return _status_bytes(pid, "VmHWM")


def own_bytes(pid: int) -> float:
    """Resident memory that is no file's: heap, stacks, arrays."""
    return _status_bytes(pid, "RssAnon")


def descriptors(pid: int) -> int:
    """Open files, sockets and pipes."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def command_line(pid: int) -> str:
    """Program and arguments, with spaces between; empty for a zombie, or if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def marked(variable: str, value: str) -> list[int]:
    """Ids of all processes that were started with this environment variable, and so what they started in turn."""
    wanted, found = f"{variable}={value}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _stat(pid: int) -> list[str]:
    """The fields after the name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _status_bytes(pid: int, name: str) -> float:
    """0 for a zombie, which has no memory."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return 1024.0 * next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
