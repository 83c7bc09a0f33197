"""Rollouts that run ahead of the updates: a thread collects for later iterations while the trainer updates.

The rollout of iteration j begins under version j − `max_staleness` of the weights or a later one, and one version
serves all of it: weights are loaded between two rollouts alone. With 0 there is no thread, and every rollout has the
newest weights. With 1 the rollout of iteration j > 0 has version j − 1, so that such a run repeats itself (but for one
that SIGTERM cut off, which has version j); above that, what a rollout had depends on who was faster. Rollouts are
handed out in order, each once; those that are finished and not yet handed out belong to a checkpoint. What a rollout is
made of is not known here (`experience`).
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from empo2_jax.errors import CheckpointError
from empo2_jax.rollout.spread import from_bytes, to_bytes
from empo2_jax.types import EpisodeGroup


@dataclass(frozen=True)
class Rollout:
    """The experience of one iteration: intrinsic rewards paid, tips and visits committed."""

    iteration: int  # from 0
    groups: tuple[EpisodeGroup, ...]
    metrics: Mapping[str, float]  # of memory and novelty once it was committed
    seconds: Mapping[str, float] = field(default_factory=dict)  # wall, by phase; {} where an earlier process spent them


class Rollouts:
    """Rollouts in the order of the iterations; all methods are for the trainer's thread.

    It begins held: `go` starts it, `hold` stops it between two rollouts, where weights may be loaded, the engine used
    and everything saved.
    """

    def __init__(
        self,
        collect: Callable[[int], Rollout],
        *,
        first: int,
        total: int,
        max_staleness: int,
        stop: Callable[[], None],
        ready: Sequence[Rollout] = (),
    ) -> None:
        """Collect nothing yet.

        Args:
            collect: Makes the rollout of an iteration; called by one thread at a time, in order.
            first: The iteration that the trainer is at.
            total: Iterations of the run.
            max_staleness: Versions that a rollout may be older than the trainer's weights at its update.
            stop: Makes a running `collect` raise; from any thread.
            ready: Rollouts of `first` and later ones that a checkpoint had.
        """
        self._collect, self._total, self._staleness, self._stop = collect, total, max_staleness, stop
        self._ready, self._next, self._version = deque(ready), first + len(ready), first
        self._held, self._busy, self._ended, self._closed = True, False, False, False
        self._waited = 0.0
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collector")
        self._work: Future[None] | None = None

    @property
    def ready(self) -> tuple[Rollout, ...]:
        """Finished rollouts that were not taken; stable while it is held."""
        return tuple(self._ready)

    def take(self) -> tuple[Rollout, float]:
        """The rollout of the next iteration, and the seconds that the trainer has waited for it here and in `hold`.

        Raises:
            Exception: what went wrong with it, or with one that was begun after it.
        """
        began = time.perf_counter()
        if not self._staleness:
            self._next += 1
            return self._collect(self._next - 1), time.perf_counter() - began
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            ended = self._ended
        if ended and self._work is not None:
            self._work.result()
        waited, self._waited = self._waited + time.perf_counter() - began, 0.0
        return self._ready.popleft(), waited

    def hold(self, always: bool) -> bool:
        """Whether nothing is collected now, and until `go`.

        Args:
            always: Wait for that. False: wait only where the trainer would have to wait for the next rollout anyway.
        """
        with self._changed:
            self._held, began = True, time.perf_counter()
            if always or not self._ready:
                self._changed.wait_for(lambda: not self._busy)
            self._waited += time.perf_counter() - began
            self._held = not self._busy
            return self._held

    def go(self, version: int) -> None:
        """Collect from now on under `version`, which the engine serves."""
        with self._changed:
            self._held, self._version = False, version
            self._changed.notify_all()
        if self._staleness and self._work is None:
            self._work = self._threads.submit(self._run)

    def close(self) -> None:
        """End the thread and what it does; safe to call twice."""
        with self._changed:
            self._closed, busy = True, self._busy
            self._changed.notify_all()
        if busy:
            self._stop()
        if self._work is not None:
            wait([self._work])
        self._threads.shutdown()

    def _run(self) -> None:
        try:
            while self._may_begin():
                rollout = self._collect(self._next)
                with self._changed:
                    self._ready.append(rollout)
                    self._next, self._busy = self._next + 1, False
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._busy, self._ended = False, True
                self._changed.notify_all()

    def _may_begin(self) -> bool:
        """Wait until the next rollout may begin; False: there is none any more."""

        def known() -> bool:
            over = self._closed or self._next == self._total
            return over or (not self._held and self._next - self._version <= self._staleness)

        with self._changed:
            self._changed.wait_for(known)
            self._busy = not self._closed and self._next < self._total
            return self._busy


def speeds(seconds: Mapping[str, float], waited: float, tokens: int) -> dict[str, float]:
    """Figures of one iteration that depend on the clock.

    `perf/tokens_per_s` of the collection; of the rollout's whole time `perf/retrieval_share` (embedding, finding and
    committing tips), `perf/memory_share` (that, and the policy writing them), and `perf/overlap`, in which the trainer
    did not wait (0 where nothing runs ahead).

    Args:
        seconds: Of the rollout, by phase.
        waited: Seconds that the trainer waited for it.
        tokens: Sampled in it.
    """
    whole = sum(seconds[name] for name in ("rollout", "novelty", "memory"))
    retrieval = seconds["retrieval_in_rollout"] + seconds["memory"]
    return {
        "perf/tokens_per_s": tokens / max(seconds["rollout"], 1e-9),
        "perf/retrieval_share": retrieval / max(whole, 1e-9),
        "perf/memory_share": (seconds["memory_in_rollout"] + seconds["memory"]) / max(whole, 1e-9),
        "perf/overlap": min(max(1 - waited / max(whole, 1e-9), 0.0), 1.0),
    }


def dump(rollouts: Sequence[Rollout], folder: Path) -> None:
    """Write rollouts into a folder: the same ones give the same bytes, whatever time they took."""
    for rollout in rollouts:
        episodes = [episode for group in rollout.groups for episode in group.episodes]
        sizes = [len(group.episodes) for group in rollout.groups]
        (folder / f"{rollout.iteration}.episodes").write_bytes(to_bytes(episodes, sizes))
        metrics = json.dumps(dict(rollout.metrics), sort_keys=True)
        (folder / f"{rollout.iteration}.json").write_text(metrics + "\n", encoding="utf-8")


def load(folder: Path) -> list[Rollout]:
    """What `dump` wrote, in order; nothing where there is no such folder.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    rollouts = []
    for path in sorted(folder.glob("*.episodes"), key=lambda path: int(path.stem)):
        try:
            episodes, sizes = from_bytes(path.read_bytes())
            metrics = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"no rollout can be read from {path}: {error}") from error
        members = iter(episodes)
        parts = [tuple(next(members) for _ in range(size)) for size in sizes]
        groups = tuple(EpisodeGroup(part[0].task, part) for part in parts)
        rollouts.append(Rollout(int(path.stem), groups, metrics))
    return rollouts
