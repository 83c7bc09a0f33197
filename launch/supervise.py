#!/usr/bin/env python3
"""Run a command as a gang of local processes; when one dies, say which and why, end the rest and start all again.

Needs nothing but Python. Its own children are all it ever signals. SIGTERM and Ctrl-C go to all of them, and then
nothing is started again. What each process says goes to `LOGS/attempt_<n>/process_<k>.log`; process 0 is also shown.
"""

import argparse
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

USER_MISTAKE = 2  # exit code that trying again does not change
STOPPED = 143
POLL_S = 0.1
LIMITS = {
    "processes": (1, 256),
    "devices": (1, 256),
    "retries": (0, 1_000_000),
    "pause": (0, 86_400),
    "grace": (0, 86_400),
}


class Parser(argparse.ArgumentParser):
    """Mistakes are one line."""

    def error(self, message: str) -> NoReturn:
        """End with it."""
        fail(message)


def main(arguments: list[str] | None = None) -> int:
    """Parse, run attempts within the budget, return the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.dry_run:
        for process in range(options.processes):
            print("+", shlex.join([*settings(options, process, "PORT"), *options.command]))
        return 0
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    first = 1 + max(
        (int(path.name[8:]) for path in options.logs.glob("attempt_*") if path.name[8:].isdecimal()), default=0
    )
    for attempt in range(first, first + options.retries + 1):
        code, cause = Attempt(options, options.logs / f"attempt_{attempt}", stop).run()
        if code == 0 or stop.is_set():
            return code
        say(f"attempt {attempt}: first cause: {cause}")
        if code == USER_MISTAKE:
            return code
        if attempt < first + options.retries:
            say(f"starting again ({first + options.retries - attempt} left)")
            stop.wait(options.pause)
    say(f"given up after {options.retries + 1} attempts; logs: {options.logs}")
    return code


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options before `--`, the command after it."""
    parser = Parser(
        prog="supervise.py",
        usage="%(prog)s [options] -- COMMAND ...",
        description="Run a command as a gang of local processes and start it again when one dies.",
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes of the gang (default: 1)")
    parser.add_argument("--devices", type=int, metavar="M", help="virtual CPU devices of each (default: real devices)")
    parser.add_argument("--retries", type=int, default=3, metavar="K", help="times to start again (default: 3)")
    parser.add_argument("--pause", type=float, default=1.0, metavar="S", help="seconds before that (default: 1)")
    parser.add_argument(
        "--grace", type=float, default=120.0, metavar="S", help="from SIGTERM to SIGKILL (default: 120)"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="(default: logs in the command's --run.dir, else runs)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    own, command = split(arguments)
    options = parser.parse_args(own)
    if not command:
        fail("no command; write it after `--`")
    for name, (least, most) in LIMITS.items():
        value = vars(options)[name]
        if value is not None and not least <= value <= most:
            fail(f"--{name} {value}: {least} to {most} is allowed")
    if options.logs is None:
        at = command.index("--run.dir") + 1 if "--run.dir" in command[:-1] else None
        options.logs = Path(command[at] if at else "runs") / "logs"
    options.command = command
    return options


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def settings(options: argparse.Namespace, process: int, port: str) -> list[str]:
    """`env NAME=VALUE ...` of one process."""
    values = []
    if options.processes > 1:
        values += [
            f"EMPO2_COORDINATOR=127.0.0.1:{port}",
            f"EMPO2_NUM_PROCESSES={options.processes}",
            f"EMPO2_PROCESS_ID={process}",
        ]
    if options.devices is not None:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={options.devices}".strip()
        values += ["JAX_PLATFORMS=cpu", f"XLA_FLAGS={flags}"]
        # A collective blocks a thread of XLA's pool, and with too few of them all wait for each other.
        values += [f"{name}={16 * options.devices}" for name in ("PJRT_NPROC", "NPROC")]
    return ["env", *values] if values else []


class Attempt:
    """One life of the gang."""

    def __init__(self, options: argparse.Namespace, logs: Path, stop: threading.Event):
        self._options, self._logs, self._stop = options, logs, stop

    def run(self) -> tuple[int, str]:
        """Exit code of the gang, and which process ended first with what."""
        port = str(free_port())
        self._logs.mkdir(parents=True)
        gang = [self._start(process, port) for process in range(self._options.processes)]
        readers = [threading.Thread(target=self._copy, args=pair) for pair in enumerate(gang)]
        for reader in readers:
            reader.start()
        cause, deadline, asked = "", float("inf"), False
        while any(child.poll() is None for child in gang):
            failed = [number for number, child in enumerate(gang) if child.poll()]
            if failed and not cause:
                cause = f"process {failed[0]}: {describe(gang[failed[0]].returncode)}"
            if (failed or self._stop.is_set()) and not asked:
                asked, deadline = True, time.monotonic() + self._options.grace
                if failed:  # give the others the time to say it themselves: a peer's failure is an error of its own
                    self._stop.wait(2.0)
                signal_all(gang, signal.SIGTERM)
            if time.monotonic() > deadline:
                signal_all(gang, signal.SIGKILL)
            time.sleep(POLL_S)
        for reader in readers:
            reader.join()
        codes = [child.returncode for child in gang]
        if not cause and any(codes):
            number = next(number for number, code in enumerate(codes) if code)
            cause = f"process {number}: {describe(codes[number])}"
        if cause:
            cause += self._last_words(int(cause.split()[1].rstrip(":")))
        if USER_MISTAKE in codes:
            return USER_MISTAKE, cause
        bad = [code for code in codes if code]
        return (128 - bad[0] if bad[0] < 0 else bad[0]) if bad else 0, cause

    def _start(self, process: int, port: str) -> subprocess.Popen[bytes]:
        command = [*settings(self._options, process, port), *self._options.command]
        # A session of its own: Ctrl-C on the terminal comes to us alone, and we pass it on once.
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)

    def _copy(self, number: int, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        with (self._logs / f"process_{number}.log").open("wb") as log:
            while data := child.stdout.read1(65536):
                log.write(data)
                log.flush()
                if number == 0:
                    sys.stderr.buffer.write(data)
                    sys.stderr.flush()

    def _last_words(self, process: int) -> str:
        text = (self._logs / f"process_{process}.log").read_text(encoding="utf-8", errors="replace")
        # JAX aborts with this when a peer is gone or frozen, and names it in the next line.
        aborted = re.findall(r"absl::Status: (.+(?:\n\d+)?)", text)
        said = re.findall(r"^error:.*", text, re.MULTILINE) or aborted or text.splitlines()
        return f": {' '.join(said[-1].split())}" if said else ""


def signal_all(gang: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """To those that still run."""
    for child in gang:
        if child.poll() is None:
            child.send_signal(number)


def describe(code: int) -> str:
    """An exit code in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def free_port() -> int:
    """From the operating system."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def say(text: str) -> None:
    """One line on standard error."""
    print(f"supervise: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    """A mistake of the user."""
    say(text)
    sys.exit(USER_MISTAKE)


if __name__ == "__main__":
    sys.exit(main())
