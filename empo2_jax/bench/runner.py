"""Runs cases: processes on the same cores, both sides in turn, one table at the end.

In full each pair has two fresh processes, one after the other; `quick` keeps one process per side for all pairs, the
other one waiting. Who goes first alternates. Progress goes to standard error.
"""

import difflib
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped

from empo2_jax.bench import goals, table
from empo2_jax.bench.base import Case, Measured, Peaks, Result, Sample, differences
from empo2_jax.errors import ConfigError

UNASKED = ("train", "logp", "tree", "memory", "envs", "plan", "decode", "turns", "gap", "publish")
SUITES = (*UNASKED, "soak")
CORES = 2  # the goals were set on so many
LIMIT_S = 1800.0  # for one answer of a child
_PEAKS = Case("machine", "empo2_jax.bench.machine:peaks", timed=False)
SideName = Literal["ours", "peer"]
Answers = dict[str, Shaped[np.ndarray, "..."]]


class ChildError(Exception):
    """A child process did not do its work; the message is one line."""


def bench(suites: Sequence[str], quick: bool, json_file: Path | None, check: bool, episodes: int | None = None) -> int:
    """`empo2 bench`: measure, print the table, write the file; returns the exit code.

    Args:
        suites: Names in `SUITES`; none = those of `UNASKED`.
        quick: Small shapes, one process per side: at most six minutes on two cores.
        json_file: Where every sample goes.
        check: Fail (1) where a stable figure misses its goal; wall-clock figures only warn.
        episodes: That cases with a number of episodes play; None: theirs.

    Raises:
        ConfigError: an unknown suite, no case or no positive number for `episodes`, a folder of `json_file` that does
            not exist, or no way to pin processes.
    """
    cases = find_cases(suites, quick)
    if episodes is not None:
        cases = with_episodes(cases, episodes)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_file}: the folder {json_file.absolute().parent} does not exist")
    with pinned() as cores:
        results, peaks = run_cases(cases, quick)
    return conclude(results, peaks, cores, json_file, check)


def find_cases(suites: Sequence[str], quick: bool) -> list[Case]:
    """The cases of these suites, of all that run unasked where none is named.

    Raises:
        ConfigError: no such suite.
    """
    for name in suites:
        if name not in SUITES:
            near = difflib.get_close_matches(name, SUITES, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"--suite: there is no suite {name!r}; the nearest is `{near}` (allowed: {', '.join(SUITES)})"
            )
    modules = [importlib.import_module(f"empo2_jax.bench.{name}") for name in suites or UNASKED]
    return [case for module in modules for case in module.cases(quick)]


def with_episodes(cases: Sequence[Case], episodes: int) -> list[Case]:
    """The cases that play episodes, this many; the others as they are.

    Raises:
        ConfigError: none does, or the number is not positive.
    """
    if episodes < 1 or not any("episodes" in case.arguments for case in cases):
        raise ConfigError(f"--episodes {episodes}: a positive number for the suite `soak` is allowed")
    return [
        replace(case, arguments={**case.arguments, "episodes": episodes}) if "episodes" in case.arguments else case
        for case in cases
    ]


def conclude(results: Sequence[Result], peaks: Peaks, cores: Sequence[int], json_file: Path | None, check: bool) -> int:
    """Print and write the results; the exit code."""
    verdicts = goals.judge(results, goals.load())
    table.show(results, verdicts, peaks, cores)
    if json_file is not None:
        json_file.write_text(json.dumps(table.record(results, verdicts, peaks, cores), indent=1) + "\n")
    return 1 if check and any(verdict.failed for verdict in verdicts) else 0


@contextmanager
def pinned() -> Generator[list[int], None, None]:
    """This process, and so the children it starts, on the first `CORES` cores that it may use.

    Raises:
        ConfigError: the system cannot pin.
    """
    if sys.platform != "linux":
        raise ConfigError(f"bench pins its processes to cores, which is done on Linux only (here: {sys.platform})")
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:CORES]
    os.sched_setaffinity(0, cores)
    try:
        yield cores
    finally:
        os.sched_setaffinity(0, before)


def run_cases(cases: Sequence[Case], quick: bool) -> tuple[list[Result], Peaks]:
    """Measure the machine, then every case."""
    _say("the machine: peak of a matrix product, bandwidth of the memory …")
    machine = run_case(_PEAKS, quick=True)
    if machine.ours is None:
        raise ChildError(machine.problem)
    peaks = Peaks(machine.ours.figures["flops"], machine.ours.figures["bandwidth"])
    results = []
    for number, case in enumerate(cases, 1):
        _say(f"[{number}/{len(cases)}] {case.name} …")
        result = run_case(case, quick)
        results.append(result)
        _say(f"[{number}/{len(cases)}] {case.name}: {table.brief(result)}")
    return results, peaks


def run_case(case: Case, quick: bool) -> Result:
    """Measure both sides of one case; what goes wrong in a child becomes the result's `problem`."""
    sides: list[SideName] = ["ours", "peer"] if case.peer else ["ours"]
    parts: dict[SideName, list[tuple[Measured, Answers]]] = {"ours": [], "peer": []}
    problems: dict[SideName, str] = {}
    before = os.getloadavg()[0]
    pairs = case.pairs if case.timed else 1
    for batch in [range(pairs)] if quick else [range(pair, pair + 1) for pair in range(pairs)]:
        working = [side for side in sides if side not in problems]
        for side, outcome in (_together if quick else _one_by_one)(case, working, batch):
            if isinstance(outcome, ChildError):
                problems[side] = str(outcome)
            else:
                parts[side].append(outcome)
    ours, peer = (_merged(parts[side]) if side not in problems else None for side in ("ours", "peer"))
    found: dict[str, float] = {}
    if ours is not None and peer is not None:
        for (_, mine), (_, theirs) in zip(parts["ours"], parts["peer"], strict=True):
            new = differences(mine, theirs, list(case.tolerances))
            found = {name: max(found.get(name, 0.0), value) for name, value in new.items()}
    problem = "; ".join(f"{side}: {text}" for side, text in problems.items())
    return Result(case, ours, peer, found, problem, (before, os.getloadavg()[0]))


def _merged(parts: Sequence[tuple[Measured, Answers]]) -> Measured | None:
    if not parts:
        return None
    samples = tuple(sample for measured, _ in parts for sample in measured.samples)
    return Measured(samples, max(measured.rss for measured, _ in parts), parts[0][0].figures)


def _together(
    case: Case, sides: Sequence[SideName], pairs: range
) -> Iterator[tuple[SideName, tuple[Measured, Answers] | ChildError]]:
    """One process per side for all pairs."""
    workers: dict[SideName, Worker] = {}
    samples: dict[SideName, list[Sample]] = {side: [] for side in sides}
    try:
        for side in sides:
            try:
                workers[side] = Worker(_function(case, side), case.arguments)
            except ChildError as error:
                yield side, error
        for pair in pairs if case.timed else ():
            for side in _order(list(workers), pair):
                try:
                    samples[side].append(workers[side].run())
                except ChildError as error:
                    workers.pop(side).close()
                    yield side, error
        for side, worker in workers.items():
            try:
                yield side, worker.finish(samples[side])
            except ChildError as error:
                yield side, error
    finally:
        for worker in workers.values():
            worker.close()


def _one_by_one(
    case: Case, sides: Sequence[SideName], pairs: range
) -> Iterator[tuple[SideName, tuple[Measured, Answers] | ChildError]]:
    """A fresh process for each side of each pair, never two at a time."""
    for pair in pairs:
        for side in _order(sides, pair):
            try:
                with Worker(_function(case, side), case.arguments) as worker:
                    yield side, worker.finish([worker.run()] if case.timed else [])
            except ChildError as error:
                yield side, error


def _order(sides: Sequence[SideName], pair: int) -> list[SideName]:
    return list(sides if pair % 2 == 0 else reversed(sides))


def _function(case: Case, side: SideName) -> str:
    return case.ours if side == "ours" else case.peer


class Worker:
    """The parent's end of a `worker` process; a context manager that ends it."""

    def __init__(self, function: str, arguments: Mapping[str, Any]):
        """Start the process and wait until its side is warm.

        Raises:
            ChildError: it failed, or a package of the peer is not installed.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="empo2-bench-")
        self._answers, self._errors = (Path(self._folder.name) / name for name in ("answers.npz", "stderr"))
        self._pipe, end = multiprocessing.Pipe()
        order = {"function": function, "arguments": dict(arguments), "answers": str(self._answers)}
        command = [sys.executable, "-m", "empo2_jax.bench.worker", str(end.fileno()), json.dumps(order)]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command, pass_fds=[end.fileno()], stdout=errors, stderr=errors, env=_environment()
            )
        end.close()
        warm = False
        try:
            first = self._receive()
            if "missing" in first:
                raise ChildError(f"{first['missing']} is not installed")
            warm = True
        finally:
            if not warm:
                self.close()

    def run(self) -> Sample:
        """One timed piece of work."""
        self._send("run")
        return Sample(**self._receive())

    def finish(self, samples: Sequence[Sample]) -> tuple[Measured, Answers]:
        """What the side was asked to show at the end; the process ends."""
        self._send("finish")
        last = self._receive()
        with np.load(self._answers) as answers:
            return Measured(tuple(samples), last["rss"], last["figures"]), dict(answers)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._pipe.close()
        try:
            self._process.wait(1.0 if self._process.poll() is None else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _send(self, message: str) -> None:
        try:
            self._pipe.send_bytes(json.dumps(message).encode())
        except OSError:
            raise ChildError(self._last_words()) from None

    def _receive(self) -> dict[str, Any]:
        try:
            if not self._pipe.poll(LIMIT_S):
                raise ChildError(f"no answer within {LIMIT_S:.0f} s")
            return json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise ChildError(self._last_words()) from None

    def _last_words(self) -> str:
        code = self._process.wait()
        lines = self._errors.read_text(errors="replace").split("\n")
        said = [line for line in lines if line.strip() and not line.startswith(" ")]
        return said[-1].strip() if said else f"the process ended with code {code}"


def _environment() -> dict[str, str]:
    """One thread pool per library, as wide as the cores; the CPU, where the peers run too."""
    threads = str(len(os.sched_getaffinity(0)))
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    fixed = {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return os.environ | fixed | dict.fromkeys(names, threads)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
