"""A world of one's own for notebook 05: behind one of eight doors is the garden; three tries.

Copy this file and change it. The contract is `empo2_jax/envs/base.py`: an `Environment` is one episode at a time, an
`EnvironmentFamily` has the tasks and the prompts, and `from_config` makes the family from the section `[env]`.
"""

import re
from collections.abc import Sequence

import numpy as np

from empo2_jax.config import EnvConfig
from empo2_jax.errors import ConfigError, EnvError
from empo2_jax.prompts import tip_entry, tips_block
from empo2_jax.randomness import generator
from empo2_jax.types import Message, Observation, Task

DOORS = ["red", "green", "blue", "white", "black", "yellow", "brown", "pink"]
HOUSES = ["north", "south", "east", "west"]
GARDEN = {"north": "brown", "south": "white", "east": "pink", "west": "blue"}  # what is to be found out
TRIES = 3


class Doors:
    """One episode."""

    goal = ""

    def reset(self, task: Task, seed: int) -> Observation:
        """Stand in the hall of house `task.variation`; nothing is drawn."""
        if task.name != "garden" or not 0 <= task.variation < len(HOUSES):
            raise EnvError(f"{task}: this world has the task garden, variations 0 to {len(HOUSES) - 1}")
        house = HOUSES[task.variation]
        return self.enter(house, GARDEN[house])

    def enter(self, house: str, door: str) -> Observation:
        """Stand in the hall of a house whose garden is behind `door`."""
        self.goal, self._door = f"find the garden of the {house} house .", door
        return _observe("you see eight doors .")

    def step(self, action: str) -> Observation:
        """`open the COLOR door`, in free text; anything else is an invalid action and changes nothing."""
        words = " ".join(re.findall(r"[a-z]+", action.lower()))
        if words not in self.admissible_actions():
            return _observe("nothing happens .", resolution="invalid")
        color = words.split()[2]
        if color == self._door:
            return _observe(f"the garden is behind the {color} door .", 100.0, words)
        return _observe(f"a wall is behind the {color} door .", 0.0, words)

    def admissible_actions(self) -> Sequence[str]:
        """All doors."""
        return sorted(f"open the {color} door" for color in DOORS)

    def close(self) -> None:
        """Nothing to release."""


def _observe(text: str, reward: float = 0.0, resolved: str = "", resolution: str = "exact") -> Observation:
    won = reward > 0
    return Observation(text, reward, reward, won, won, text, resolved=resolved, resolution=resolution)


class DoorsFamily:
    """The houses and all texts around an episode."""

    name = "doors"
    max_score = 100.0
    demonstration_kinds = ()

    def __init__(self, variations: int):
        self._variations = variations

    def tasks(self, split: str) -> list[Task]:
        """The same houses in every split."""
        return [self.task("garden", variation) for variation in range(self._variations)]

    def task(self, name: str, variation: int) -> Task:
        """The problem of this name and number."""
        return Task(self.name, name, variation)

    def solution(self, task: Task) -> list[str]:
        """The one action that is needed."""
        return [f"open the {GARDEN[HOUSES[task.variation]]} door"]

    def vocabulary(self) -> list[str]:
        """All words, since this language is closed; a world of free language returns []."""
        texts = [
            "find the garden of the house . you see eight doors . nothing happens . a wall is behind the door .",
            self.tip_request("", 0.0),
            tip_entry("", "open the", 0.0),
            tips_block(["x"]),
            " ".join([*DOORS, *HOUSES, "100"]),
        ]
        return list(dict.fromkeys(re.findall(r"\w+|[^\w\s]", " ".join(texts).lower())))

    def make(self) -> Doors:
        """A new episode."""
        return Doors()

    def system_prompt(self) -> str:
        """None."""
        return ""

    def first_turn(self, goal: str, observation: str) -> str:
        """Opens the chat. Say here how to answer, if the model does not know."""
        return f"{goal} {observation}"

    def next_turn(self, observation: str) -> str:
        """After an action."""
        return observation

    def tip_request(self, observation: str, score: float) -> str:
        """Asks for one line of advice after the last action."""
        return f"{observation} the episode is over with score {score:.0f} . write one tip ."

    def memory_key(self, goal: str, state: str) -> str:
        """What is embedded to find tips: situations with alike keys share advice."""
        return f"{goal} {state}"

    def scripted_tip(self, goal: str, steps: Sequence[tuple[str, str]], score: float) -> str:
        """A tip by rule: the last thing that was seen."""
        return steps[-1][1] if steps else ""

    def demonstrations(self, split: str, count: int, seed: int, kinds: Sequence[str] = ()) -> list[list[Message]]:
        """Chats of somebody who opens doors by chance, never one twice, or follows a tip, and writes a tip."""
        return [_demonstration(self, generator(seed, "doors", split, number)) for number in range(count)]

    def close(self) -> None:
        """Nothing to release."""


def _demonstration(family: DoorsFamily, rng: np.random.Generator) -> list[Message]:
    world, (door, *others) = Doors(), rng.permutation(DOORS).tolist()
    observation = world.enter(HOUSES[rng.integers(len(HOUSES))], door)
    colors, tips = rng.permutation([door, *others]).tolist()[:TRIES], []
    if rng.random() < 0.5:
        tips = [tip_entry(f"the garden is behind the {door} door .", f"open the {door} door", 100.0)]
        colors = [door]
    turn, messages = family.first_turn(world.goal, observation.text), []
    for color in colors:
        messages += [Message("user", turn + tips_block(tips)), Message("assistant", f"open the {color} door")]
        observation = world.step(f"open the {color} door")
        turn = family.next_turn(observation.text)
        if observation.done:
            break
    request = family.tip_request(observation.text, observation.score)
    return [*messages, Message("user", request), Message("assistant", observation.text)]


def from_config(config: EnvConfig, *, panel: int, workers: int) -> DoorsFamily:
    """What `env.name = "worlds.doors"` finds; `panel` and `workers` matter to worlds that cost something."""
    if not 1 <= config.train_variations <= len(HOUSES):
        raise ConfigError(f"env.train_variations = {config.train_variations}: this world has 1 to {len(HOUSES)} houses")
    return DoorsFamily(config.train_variations)
