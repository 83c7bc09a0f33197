"""Who is collected when, under which weights, and what becomes of errors; with rollouts that only count."""

import dataclasses
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest

from empo2_jax.errors import CheckpointError, EnvError
from empo2_jax.interrupts import Stopped
from empo2_jax.rollout import ahead
from empo2_jax.rollout.ahead import Rollout, Rollouts
from empo2_jax.types import EpisodeGroup, Mode, Task
from tests.fixtures.episodes import make_episode

LIMIT_S = 20.0


def eventually(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class World:
    """A trainer, an engine and a collector that remember what happened."""

    def __init__(self, max_staleness: int, total: int = 6, ready: tuple[Rollout, ...] = (), first: int = 0) -> None:
        self.version = first  # that the engine serves
        self.versions: list[int] = []  # under which rollouts were begun, in their order
        self.threads: set[str] = set()
        self.gate = threading.Event()  # closed: a rollout takes for ever
        self.gate.set()
        self.failing: dict[int, Exception] = {}
        self.stopped = threading.Event()
        self.rollouts = Rollouts(
            self.collect, first=first, total=total, max_staleness=max_staleness, stop=self.stop, ready=ready
        )

    def stop(self) -> None:
        self.stopped.set()
        self.gate.set()

    def collect(self, iteration: int) -> Rollout:
        assert iteration == len(self.versions)
        self.versions.append(self.version)
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(LIMIT_S)
        if self.stopped.is_set():
            raise Stopped("asked to stop")
        if iteration in self.failing:
            raise self.failing[iteration]
        return Rollout(iteration, (), {})

    def load(self, version: int, always: bool = True) -> bool:
        if held := self.rollouts.hold(always):
            self.version = version
            self.rollouts.go(version)
        return held


@pytest.fixture
def worlds() -> Generator[Callable[..., World]]:
    made: list[World] = []

    def make(*arguments: int, **settings: object) -> World:
        made.append(World(*arguments, **settings))
        return made[-1]

    yield make
    for world in made:
        world.stop()
        world.rollouts.close()


def test_without_staleness_every_rollout_has_the_newest_weights_and_no_thread(worlds):
    world = worlds(0)
    world.rollouts.go(0)
    for iteration in range(6):
        assert len(world.versions) == iteration, "collected before it was asked for"
        rollout, _ = world.rollouts.take()
        assert rollout.iteration == iteration
        assert world.load(iteration + 1, always=False)
    assert world.versions == [0, 1, 2, 3, 4, 5]
    assert world.threads == {threading.current_thread().name}
    assert world.rollouts.ready == ()


@pytest.mark.parametrize("always", [True, False])
def test_one_behind_has_the_version_before_from_the_second_rollout_on(worlds, always):
    world = worlds(1)
    world.rollouts.go(0)
    for iteration in range(6):
        rollout, _ = world.rollouts.take()
        assert rollout.iteration == iteration
        eventually(
            lambda following=iteration + 2: len(world.versions) == min(following, 6)
        )  # while the trainer updates
        assert world.load(iteration + 1, always)
    assert world.versions == [0, 0, 1, 2, 3, 4]
    assert world.threads == {"collector_0"}


def test_further_ahead_is_bounded_and_loads_do_not_wait_for_a_running_rollout(worlds):
    world = worlds(2)
    world.rollouts.go(0)
    eventually(lambda: len(world.rollouts.ready) == 3)
    time.sleep(0.05)
    assert world.versions == [0, 0, 0], "rollout 3 may not begin under version 0"
    world.rollouts.take()
    world.gate.clear()
    assert world.load(1)
    eventually(lambda: world.versions == [0, 0, 0, 1])
    world.rollouts.take()  # rollout 1, of version 0, at iteration 1
    assert not world.load(2, always=False), "rollout 2 is ready: no reason to wait for rollout 3"
    world.rollouts.take()
    world.gate.set()
    assert world.load(
        3, always=False
    )  # nothing is ready: rollout 3 is waited for, and 4 did not begin with old weights
    eventually(lambda: len(world.versions) == 6)
    assert world.versions == [0, 0, 0, 1, 3, 3]
    ages = [iteration - version for iteration, version in enumerate(world.versions)]
    assert max(ages) <= 2


def test_held_means_that_nothing_runs(worlds):
    world = worlds(1)
    world.gate.clear()
    world.rollouts.go(0)
    eventually(lambda: world.versions == [0])
    holding = threading.Thread(target=lambda: world.rollouts.hold(True))
    holding.start()
    time.sleep(0.05)
    assert holding.is_alive(), "did not wait for the running rollout"
    world.gate.set()
    holding.join(LIMIT_S)
    time.sleep(0.05)
    assert world.versions == [0] and [rollout.iteration for rollout in world.rollouts.ready] == [0]
    world.rollouts.go(0)
    eventually(lambda: world.versions == [0, 0])


@pytest.mark.parametrize("error", [EnvError("3 of 4 episodes failed"), Stopped("asked to stop")])
def test_what_goes_wrong_in_the_thread_is_raised_where_rollouts_are_taken(worlds, error):
    world = worlds(1)
    world.failing[1] = error
    world.rollouts.go(0)
    eventually(lambda: world.versions == [0, 0])
    world.rollouts.hold(True)  # does not wait for ever
    with pytest.raises(type(error), match=str(error)):
        world.rollouts.take()
    assert [rollout.iteration for rollout in world.rollouts.ready] == [0], "what was finished can be saved"


def test_close_ends_what_is_running_and_may_come_twice(worlds):
    world = worlds(1)
    world.gate.clear()
    world.rollouts.go(0)
    eventually(lambda: world.versions == [0])
    world.rollouts.close()
    assert world.stopped.is_set()
    world.rollouts.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "collector_0"]


def test_a_checkpoint_s_rollouts_come_first_and_are_not_collected_again(worlds):
    before = Rollout(0, (), {"memory/size": 3.0})
    world = worlds(1, total=3, ready=(before,))
    world.versions.append(-1)  # rollout 0, of an earlier process
    world.rollouts.go(0)
    assert world.rollouts.take()[0] is before
    eventually(lambda: len(world.versions) == 2)
    assert world.load(1)
    assert [world.rollouts.take()[0].iteration for _ in range(2)] == [1, 2]
    assert world.versions == [-1, 0, 1]


def test_speeds_are_shares_of_the_rollout():
    seconds = {"rollout": 8.0, "novelty": 1.0, "memory": 1.0, "retrieval_in_rollout": 0.5, "memory_in_rollout": 2.5}
    assert ahead.speeds(seconds, waited=2.5, tokens=400) == pytest.approx(
        {"perf/tokens_per_s": 50.0, "perf/retrieval_share": 0.15, "perf/memory_share": 0.35, "perf/overlap": 0.75}
    )
    assert ahead.speeds(seconds, waited=10.1, tokens=0)["perf/overlap"] == 0.0


def rollout(iteration: int) -> Rollout:
    third = np.float32(1) / 3
    episodes = [make_episode([[5, 6], [7]], mode=mode, intrinsic=[float(third), 0.1]) for mode in Mode]
    aged = [dataclasses.replace(episode, task=Task("toy", "bulb", 4), policy_version=7) for episode in episodes]
    groups = (
        EpisodeGroup(Task("toy", "bulb", 0), tuple(episodes[:1])),
        EpisodeGroup(Task("toy", "bulb", 4), tuple(aged)),
    )
    return Rollout(iteration, groups, {"memory/size": 12.0, "memory/utility": 0.1}, {"rollout": 3.0})


def test_a_dumped_rollout_comes_back_bit_for_bit_and_without_its_times(tmp_path: Path):
    given = [rollout(9), rollout(10)]
    ahead.dump(given, tmp_path)
    for loaded, original in zip(ahead.load(tmp_path), given, strict=True):
        assert (loaded.iteration, loaded.metrics, loaded.seconds) == (original.iteration, original.metrics, {})
        assert [group.task for group in loaded.groups] == [group.task for group in original.groups]
        for ours, theirs in zip(loaded.groups, original.groups, strict=True):
            for episode, other in zip(ours.episodes, theirs.episodes, strict=True):
                assert dataclasses.replace(episode, steps=()) == dataclasses.replace(other, steps=())
                for step, same in zip(episode.steps, other.steps, strict=True):
                    assert step.intrinsic_reward == same.intrinsic_reward
                    for name in ("prompt_ids", "bare_prompt_ids", "action_ids", "behavior_logprobs"):
                        assert getattr(step, name).dtype == getattr(same, name).dtype
                        np.testing.assert_array_equal(getattr(step, name), getattr(same, name))
    again = tmp_path / "again"
    again.mkdir()
    ahead.dump([dataclasses.replace(one, seconds={"rollout": 99.0}) for one in given], again)
    for path in tmp_path.glob("*.*"):
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_nothing_is_loaded_where_nothing_was_dumped_and_damage_is_named(tmp_path: Path):
    assert ahead.load(tmp_path / "rollouts") == []
    ahead.dump([rollout(2)], tmp_path)
    (tmp_path / "2.json").unlink()
    with pytest.raises(CheckpointError, match=r"no rollout can be read from .*2\.episodes"):
        ahead.load(tmp_path)
