"""Episodes survive the journey bit for bit, and shares together are what one collector would have collected."""

import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from empo2_jax.rollout.collect import Assignment
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.rollout.spread import SpreadCollector, from_bytes, share, to_bytes
from empo2_jax.types import Mode, StopReason
from tests.fixtures.episodes import make_episode
from tests.fixtures.worlds import CorridorFamily, babble, corridor, empty_memory, make_collector, remember, word_chat


def plain(value: Any) -> Any:
    """Comparable, and different where a dtype is."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tobytes()
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return tuple(map(plain, value)) if isinstance(value, tuple | list) else (type(value), value)


@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=5),
    st.lists(
        st.floats(width=32, allow_nan=False) | st.just(math.nan), min_size=4, max_size=4
    ),  # a NaN keeps no payload
    st.sampled_from(list(Mode)),
    st.sampled_from(list(StopReason)),
    st.text(),
)
def test_round_trip(actions: list[list[int]], logprobs: list[float], mode: Mode, stop: StopReason, text: str) -> None:
    episode = make_episode(actions, mode=mode, stop_reason=stop)
    steps = tuple(
        dataclasses.replace(
            step,
            behavior_logprobs=np.array(logprobs[: len(step.action_ids)], np.float32),
            observation=text,
            tips=(text, ""),
            tip_scores=(0.1, -1e300),
            policy_version=3,
            version_spans=((2, 0, 1), (3, 1, 2)),
        )
        for step in episode.steps
    )
    episode = dataclasses.replace(episode, steps=steps, tip=text, error=text, score=1 / 3)
    (found,), counts = from_bytes(to_bytes([episode], [3]))
    assert plain(found) == plain(episode)
    assert counts == [3]


def test_prompts_that_grow_travel_once() -> None:
    long = make_episode([list(range(50))] * 30)
    assert sum(step.prompt_ids.nbytes for step in long.steps) > 80_000
    assert len(to_bytes([long])) < 8_000
    assert from_bytes(to_bytes([])) == ([], [])


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_a_partition_in_order(count: int, size: int) -> None:
    bounds = [share(count, process, size) for process in range(size)]
    assert [number for start, stop in bounds for number in range(start, stop)] == list(range(count))
    assert max(stop - start for start, stop in bounds) - min(stop - start for start, stop in bounds) <= 1


class Threads:
    """Processes as threads of this one."""

    size = 3

    def __init__(self, process: int, barrier: threading.Barrier, board: list[bytes]) -> None:
        self.process, self._barrier, self._board = process, barrier, board

    def gather(self, call: Callable[[], bytes], what: str) -> list[bytes]:
        self._board[self.process] = call()
        self._barrier.wait(30)
        return list(self._board)


@pytest.mark.parametrize("count", [2, 7])
def test_shares_are_what_one_collector_collects(count: int) -> None:
    assignments = [Assignment(f"i1/g0/e{number}", corridor(), Mode(number % 3)) for number in range(count)]

    def collector() -> Any:
        return make_collector(ReplayEngine(babble(word_chat())), CorridorFamily(2), step_limit=2)

    def memory() -> Any:
        made, teacher = empty_memory(), collector()
        (episode,) = teacher.collect([Assignment("teacher", corridor())], temperature=1.0)
        teacher.close()
        remember(made, [dataclasses.replace(episode, tip="the bulb is in the vase .")])
        return made

    one, whole = collector(), memory()
    wanted = one.collect(assignments, temperature=1.0, memory=whole)
    one.close()
    assert whole.retrievals[1] > 0
    barrier, board = threading.Barrier(Threads.size), [b""] * Threads.size
    results: list[Any] = [None] * Threads.size

    def run(process: int) -> None:
        spread, own = SpreadCollector.__new__(SpreadCollector), memory()
        spread.__dict__.update(collector().__dict__, _processes=Threads(process, barrier, board))
        results[process] = spread.collect(assignments, temperature=1.0, memory=own), own.retrievals
        spread.close()

    threads = [threading.Thread(target=run, args=(process,)) for process in range(Threads.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for found, retrievals in results:
        assert plain(tuple(found)) == plain(tuple(wanted))
        assert retrievals == whole.retrievals
