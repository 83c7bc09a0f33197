"""Episodes awaited together: order, deadlines, cancellation, and what is left behind afterwards."""

import asyncio
import os
import signal
import threading
import time

import pytest

from empo2_jax.envs import scienceworld, toy
from empo2_jax.envs.in_flight import InFlight
from empo2_jax.envs.pool import Pool
from empo2_jax.envs.scienceworld_jvm import LEAN_FLAGS, Jvm
from empo2_jax.envs.simple import SimpleFamily
from empo2_jax.errors import EnvError
from empo2_jax.types import Observation, Task

TASK = Task("sleepers", "sleep", 0)
NOTHING = Observation("nothing", 0.0, 0.0, False, False, "nothing")


class Sleeper:
    """A world that thinks as long as it is told; closing it ends the thought."""

    goal = "sleep"

    def __init__(self, family: "Sleepers") -> None:
        self.family, self.closed = family, threading.Event()

    def reset(self, task: Task, seed: int) -> Observation:
        with self.family.lock:
            self.family.open += 1
            self.family.most = max(self.family.most, self.family.open)
        return NOTHING

    def step(self, action: str) -> Observation:
        if self.closed.wait(float(action)):
            raise EnvError("closed during a call")
        return NOTHING

    def admissible_actions(self) -> list[str]:
        return ["0"]

    def close(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            with self.family.lock:
                self.family.open -= 1


class Sleepers(SimpleFamily):
    name = "sleepers"

    def __init__(self) -> None:
        self.lock, self.open, self.most = threading.Lock(), 0, 0

    def tasks(self, split: str) -> list[Task]:
        return [TASK]

    def make(self) -> Sleeper:
        return Sleeper(self)


async def episode(flights: InFlight, *actions: str, task: Task = TASK) -> list[str]:
    async with flights.episode() as flight:
        seen = [await flight.reset(task, 0)]
        for action in actions:
            seen.append(await flight.step(action))
        return [item.text for item in seen]


def test_many_episodes_are_in_flight_and_give_what_they_give_one_by_one():
    family = toy.family()
    actions = [f"look in the {place}" for place in ("drawer", "boot", "attic")]

    async def together() -> list[list[str]]:
        flights = InFlight(family, most=3)
        played = await asyncio.gather(*(episode(flights, *actions, task=task) for task in family.tasks("train") * 5))
        flights.close()
        return played

    alone = []
    for task in family.tasks("train"):
        environment = family.make()
        alone.append([environment.reset(task, 0).text, *(environment.step(action).text for action in actions)])
    assert asyncio.run(together()) == alone * 5


def test_no_more_than_allowed_hold_a_world_and_the_figures_tell_it():
    family = Sleepers()

    async def together() -> InFlight:
        flights = InFlight(family, most=4)
        await asyncio.gather(*(episode(flights, "0.02", "0.02") for _ in range(12)))
        flights.close()
        return flights

    figures = asyncio.run(together()).figures()
    assert (family.most, family.open) == (4, 0)
    assert (figures.episodes, figures.steps, figures.late) == (12, 24, 0)
    assert 0.02 <= figures.step_p50 <= figures.step_p95
    assert figures.wait_p95 >= 0.06  # of the last ones, behind two others


def test_a_late_call_is_a_typed_failure_and_its_neighbors_go_on():
    family = Sleepers()

    async def together() -> tuple[list, float]:
        flights = InFlight(family, most=2, timeout_s=0.2)
        before = time.monotonic()
        played = await asyncio.gather(
            episode(flights, "60"), episode(flights, *["0.05"] * 8), episode(flights, "0"), return_exceptions=True
        )
        took = time.monotonic() - before
        assert flights.figures().late == 1
        flights.close()
        return played, took

    (late, *others), took = asyncio.run(together())
    assert isinstance(late, EnvError) and str(late) == "sleepers: no answer within 0.2 s"
    assert others == [["nothing"] * 9, ["nothing"] * 2]
    assert took < 10.0 and family.open == 0


def test_a_canceled_episode_leaves_nothing_behind():
    family = Sleepers()

    async def cancel() -> None:
        flights = InFlight(family, most=1)
        running = asyncio.create_task(episode(flights, "60"))
        await asyncio.sleep(0.1)
        assert family.open == 1
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert family.open == 0
        assert await episode(flights, "0") == ["nothing"] * 2  # its turn is free again
        flights.close()

    asyncio.run(cancel())


class Unused:
    """A simulator that nobody plays on."""

    usable, resident_mb = True, 0.0

    def kill(self) -> None:
        self.usable = False


def test_a_simulator_that_comes_after_the_deadline_is_given_back():
    ready = threading.Event()

    def start() -> Unused:
        ready.wait(10.0)
        return Unused()

    family = scienceworld.family(tasks=["find-non-living-thing"], simplification="easy", workers=1)
    family.pool = Pool(start, size=1)

    async def late() -> None:
        flights = InFlight(family, most=1, timeout_s=0.1)
        with pytest.raises(EnvError, match=r"no answer within 0\.1 s"):
            await episode(flights, task=Task("scienceworld", "find-non-living-thing", 0))
        ready.set()
        flights.close()

    asyncio.run(late())
    figures = family.pool.figures()
    assert (figures.leased, figures.idle) == (0, 1)


@pytest.mark.slow
def test_1000_episodes_in_flight_keep_their_memory_while_simulators_are_killed():
    started: list[Jvm] = []

    def start() -> Jvm:
        started.append(Jvm(LEAN_FLAGS, timeout_s=60.0))
        return started[-1]

    family = scienceworld.family(tasks=["find-non-living-thing"], simplification="easy", workers=3)
    family.pool = Pool(start, size=3)
    resident: list[float] = []

    async def one(flights: InFlight, number: int) -> str:
        async with flights.episode() as flight:
            await flight.reset(Task("scienceworld", "find-non-living-thing", number % 300), 0)
            await flight.step("look around")
            if number % 100 == 50:
                os.kill(next(jvm.pid for jvm in reversed(started) if jvm.usable), signal.SIGKILL)
            seen = await flight.step("focus on agent")
            resident.append(family.pool.figures().largest_mb)
            return f"{seen.score:g} {seen.done}"

    async def all_of_them() -> list:
        flights = InFlight(family, most=3, timeout_s=300.0)
        played = await asyncio.gather(*(one(flights, number) for number in range(1000)), return_exceptions=True)
        flights.close()
        return played

    played = asyncio.run(all_of_them())
    assert [item for item in played if isinstance(item, BaseException)] == []
    assert all(len(set(played[variation::300])) == 1 for variation in range(300))  # killed simulators changed nothing
    assert 1 <= family.pool.events["episodes recovered"] <= 10
    assert family.pool.events["episodes lost"] == 0
    assert len(started) <= 3 + 10
    assert max(resident) <= 140.0
    assert sum(resident[-100:]) <= 1.1 * sum(resident[200:300])
    family.close()
    assert not any(jvm.usable for jvm in started)
