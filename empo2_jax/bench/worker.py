"""The child process of one side: makes it, then answers `run` and `finish` on a connection, in JSON.

Started by `runner.Worker`, from which it inherits its cores. Packages of a peer that are not installed are reported,
every other failure ends the process with its traceback.
"""

import importlib
import json
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from empo2_jax.bench.base import Side

OPTIONAL = ("torch", "transformers", "scienceworld", "py4j")  # packages that only a peer needs


def main(handle: int, order: str) -> None:
    """Serve one side until `finish`.

    Args:
        handle: File descriptor of the connection.
        order: JSON object with `function` (module:function), `arguments` and `answers` (file to write).
    """
    wanted = json.loads(order)
    with Connection(handle) as pipe:
        module, _, function = wanted["function"].partition(":")
        try:
            make = getattr(importlib.import_module(module), function)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            _send(pipe, {"missing": error.name})
            return
        side: Side = make(**wanted["arguments"])
        _send(pipe, {"ready": True})
        while json.loads(pipe.recv_bytes()) == "run":
            _send(pipe, _timed(side))
        # The figures come after the peak is read, since to make them may take more memory than the work.
        rss = peak_rss()
        with Path(wanted["answers"]).open("wb") as file:
            np.savez(file, allow_pickle=False, **side.answer())
        _send(pipe, {"rss": float(rss), "figures": dict(side.figures())})


def _timed(side: Side) -> dict[str, float]:
    cpu, wall = time.process_time() + side.helpers_cpu(), time.perf_counter()
    side.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() + side.helpers_cpu() - cpu
    return {"wall": wall / side.work, "cpu": cpu / side.work}


def peak_rss() -> int:
    """Bytes; not `getrusage`, whose peak a child inherits from the process that started it."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
