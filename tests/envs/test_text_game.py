"""What holds for any text game, shown with one that needs no engine."""

import threading

import pytest

from empo2_jax.envs.text_game import NOTHING, Game, GameEnvironment, Said
from empo2_jax.errors import EnvError
from empo2_jax.types import Task

TASK = Task("counting", "to", 2)


class Counting:
    """Say `next` until the variation is reached; half of the points on the way."""

    goal = "count"

    def __init__(self, task: Task) -> None:
        self.number, self.last, self.closed = 0, task.variation, 0
        self.entered, self.leave = threading.Event(), threading.Event()

    def opening(self) -> str:
        return "zero"

    def view(self) -> str:
        return f"at {self.number}"

    def commands(self) -> list[str]:
        return ["next"]

    def send(self, command: str) -> Said:
        if command == "wait":
            self.entered.set()
            assert self.leave.wait(10.0)
        if command != "next":
            return Said("no", 100.0 * self.number / self.last, False, False, "invalid")
        self.number += 1
        return Said("yes", 100.0 * self.number / self.last, *[self.number == self.last] * 2, "exact")

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def games():
    return []


@pytest.fixture
def environment(games):
    def begin(task: Task) -> Game:
        games.append(Counting(task))
        return games[-1]

    return GameEnvironment("counting", begin)


def test_rewards_are_differences_and_the_end_is_final(environment):
    first = environment.reset(TASK, 0)
    assert (first.text, first.state, environment.goal, environment.admissible_actions()) == (
        "zero",
        "at 0",
        "count",
        ["next"],
    )
    seen = [environment.step(text) for text in ("Next.", "what", "next", "next")]
    assert [item.reward for item in seen] == [50.0, 0.0, 50.0, 0.0]
    assert [item.score for item in seen] == [50.0, 50.0, 100.0, 100.0]
    assert [item.resolution for item in seen] == ["exact", "invalid", "exact", "invalid"]
    assert [(item.done, item.success) for item in seen] == [(False, False), (False, False), (True, True), (True, True)]
    assert (seen[-1].text, seen[-1].state, environment.admissible_actions()) == (NOTHING, "at 2", [])


def test_empty_text_does_not_reach_the_game(environment):
    environment.reset(TASK, 0)
    assert [environment.step(text).text for text in ("", " \x00 ", '"."')] == [NOTHING] * 3


def test_a_game_is_closed_once_by_the_next_reset_or_by_close(environment, games):
    environment.close()
    for _ in range(2):
        environment.reset(TASK, 0)
    environment.close()
    environment.close()
    assert [game.closed for game in games] == [1, 1]
    with pytest.raises(EnvError, match="counting: step before a reset"):
        environment.step("next")


def test_close_waits_for_the_call_that_runs(environment, games):
    environment.reset(TASK, 0)
    stepping = threading.Thread(target=environment.step, args=("wait",))
    stepping.start()
    assert games[0].entered.wait(10.0)
    closing = threading.Thread(target=environment.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive() and games[0].closed == 0
    games[0].leave.set()
    stepping.join(10.0)
    closing.join(10.0)
    assert games[0].closed == 1
