"""The wrapper of Gymnasium's form, with values by hand."""

import pytest

from empo2_jax.envs.gymnasium import GymnasiumFamily, TextGymnasium
from empo2_jax.errors import ConfigError, EnvError
from empo2_jax.types import Task


class Counter:
    """Counts to `seed`; half a point for every right number, ended by the world after four."""

    closed = 0

    def reset(self, *, seed=None):
        self.seed, self.count, self.steps = seed, 0, 0
        return f"Count to {seed}.", {}

    def step(self, action):
        self.steps += 1
        right = action == str(self.count + 1)
        self.count += right
        return f"At {self.count}.", 0.5 * right, self.count == self.seed, self.steps == 4, {}

    def close(self):
        Counter.closed += 1


@pytest.fixture
def family():
    return GymnasiumFamily("counting", {"up": Counter}, splits={"train": 3, "dev": 1, "test": 2})


def test_splits_follow_each_other(family):
    assert [task.variation for split in ("train", "dev", "test") for task in family.tasks(split)] == [0, 1, 2, 3, 4, 5]
    assert family.task("up", 5) == Task("counting", "up", 5)
    with pytest.raises(ConfigError, match="the tasks are up"):
        family.task("up", 6)
    with pytest.raises(ConfigError, match="train, dev, test"):
        family.tasks("valid")
    with pytest.raises(ConfigError, match="sizes of train"):
        GymnasiumFamily("counting", {"up": Counter}, splits={"train": 1})


def test_rewards_are_scaled_and_termination_at_the_full_score_is_success(family):
    assert isinstance(Counter(), TextGymnasium)
    environment = family.make()
    first = environment.reset(Task("counting", "up", 2), 7)
    assert (first.text, first.score, environment.goal, list(environment.admissible_actions())) == (
        "Count to 2.",
        0.0,
        "up",
        [],
    )
    seen = [environment.step(action) for action in (" 1 ", "7", "2")]
    assert [(item.reward, item.score, item.done, item.success) for item in seen] == [
        (50.0, 50.0, False, False),
        (0.0, 50.0, False, False),
        (50.0, 100.0, True, True),
    ]
    assert seen[0].resolved == "1"
    with pytest.raises(EnvError, match="reset first"):
        environment.step("3")


def test_truncation_ends_without_success_and_close_releases_what_was_made(family):
    environment = family.make()
    environment.reset(Task("counting", "up", 5), 0)
    last = [environment.step(str(number)) for number in (1, 2, 3, 9)][-1]
    assert (last.done, last.success, last.score) == (True, False, 150.0)
    before = Counter.closed
    environment.close()
    environment.close()
    assert Counter.closed == before + 1
    with pytest.raises(EnvError, match="there are up"):
        environment.reset(Task("counting", "down", 0), 0)
