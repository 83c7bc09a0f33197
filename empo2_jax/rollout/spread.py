"""Episodes over several processes: each collects its share, and all get all of them, in the order of the assignments.

What a process needs for its share (weights, tips) it has; draws are named by the episode, so that the share an episode
is in changes nothing but the last bits of its log-probs (other neighbors in the engine). Episodes travel as compressed
JSON: readable by any version, and nothing of it can run.
"""

import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from empo2_jax.rollout.collect import Assignment, Collector, CountingTips, Keeper, TipSource
from empo2_jax.rollout.reflect import TipWriter
from empo2_jax.types import Episode, Mode, Step, StopReason, Task

TOKENS = ("prompt_ids", "bare_prompt_ids", "action_ids")  # ids of a step; prompts grow from step to step


@runtime_checkable
class Processes(Protocol):
    """Who shares the work; `distributed.Gang` is one."""

    process: int
    size: int

    def gather(self, call: Callable[[], bytes], what: str) -> list[bytes]:
        """What `call` returns on every process."""
        ...


class SpreadCollector(Collector):
    """A collector that runs a share of the assignments and returns the episodes of all."""

    def __init__(self, processes: Processes, *parts: Any, **settings: Any):
        """`parts` and `settings` are those of `Collector`."""
        super().__init__(*parts, **settings)
        self._processes = processes

    def collect(
        self,
        assignments: Sequence[Assignment],
        *,
        temperature: float,
        memory: TipSource | None = None,
        writer: TipWriter | None = None,
        keeper: Keeper | None = None,
    ) -> list[Episode]:
        """As `Collector.collect`; every process calls it with the same assignments."""
        start, stop = share(len(assignments), self._processes.process, self._processes.size)
        before = memory.retrievals if isinstance(memory, CountingTips) else (0, 0, 0)
        collect = partial(super().collect, temperature=temperature, memory=memory, writer=writer, keeper=keeper)

        def own() -> bytes:
            episodes = collect(assignments[start:stop])
            after = memory.retrievals if isinstance(memory, CountingTips) else before
            return to_bytes(episodes, np.subtract(after, before).tolist())

        parts = [from_bytes(part) for part in self._processes.gather(own, "rollout")]
        if isinstance(memory, CountingTips):  # every process counts what all have retrieved
            queries, hits, retrieved = np.sum([before, *(counts for _, counts in parts)], axis=0).tolist()
            memory.retrievals = (queries, hits, retrieved)
        return [episode for episodes, _ in parts for episode in episodes]


def share(count: int, process: int, size: int) -> tuple[int, int]:
    """Bounds of a process's part of `count` things: neighbors stay together (they share prompts), sizes differ by 1."""
    return count * process // size, count * (process + 1) // size


def to_bytes(episodes: Sequence[Episode], counts: Sequence[int] = ()) -> bytes:
    """Episodes (and some counts) as compressed JSON; prompts as what they add to those of the step before."""
    values = {"counts": list(counts), "episodes": [_plain(episode) for episode in episodes]}
    return zlib.compress(json.dumps(values, default=_number).encode(), 1)


def from_bytes(data: bytes) -> tuple[list[Episode], list[int]]:
    """What `to_bytes` was given, bit for bit."""
    values = json.loads(zlib.decompress(data))
    return [_episode(episode) for episode in values["episodes"]], values["counts"]


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not part of an episode")


def _fields(value: Episode | Step | Task) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _plain(episode: Episode) -> dict[str, Any]:
    values = _fields(episode)
    values["task"] = _fields(episode.task)
    values["steps"] = steps = []
    before = {name: np.zeros(0, np.int32) for name in TOKENS}
    for step in episode.steps:
        plain = _fields(step)
        for name, known in before.items():
            array = plain[name]
            width = min(len(known), len(array))
            differ = np.flatnonzero(known[:width] != array[:width])
            kept = int(differ[0]) if differ.size else width
            plain[name] = [kept, array[kept:].tolist()]
            before[name] = array
        plain["behavior_logprobs"] = step.behavior_logprobs.tolist()
        steps.append(plain)
    return values


def _episode(values: dict[str, Any]) -> Episode:
    before = {name: np.zeros(0, np.int32) for name in TOKENS}
    steps = []
    for plain in values["steps"]:
        for name, known in before.items():
            kept, rest = plain[name]
            plain[name] = before[name] = np.concatenate([known[:kept], np.array(rest, np.int32)])
        plain["behavior_logprobs"] = np.array(plain["behavior_logprobs"], np.float32)
        plain["tips"], plain["tip_scores"] = tuple(plain["tips"]), tuple(plain["tip_scores"])
        plain["version_spans"] = tuple(map(tuple, plain["version_spans"]))
        steps.append(Step(**plain))
    values["task"], values["steps"] = Task(**values["task"]), tuple(steps)
    values["mode"], values["stop_reason"] = Mode(values["mode"]), StopReason(values["stop_reason"])
    return Episode(**values)
