"""Chats for the supervised warm start: gold paths replayed in the real simulator, with detours, failures and tips.

Four kinds take turns: the gold path; the gold path with harmless detours; the gold path with the tip of an earlier
success in every turn, as memory shows it; a stay that explores, sometimes tries deeds blindly and ends early, every
second time with the tip of another such stay. Each closes with the request for a tip and a truthful tip by rule, so
that a small model learns to act, to use tips and to write them. Tips and exploration alone make a newcomer, who hardly
ever saw a solution without a tip. Gold paths come from a Java process of their own (generating them would slow every
later reset of a stepping one) and are cached as JSON.
"""

import json
import os
from collections.abc import Sequence

import numpy as np

from empo2_jax.cache import cache_folder
from empo2_jax.envs.base import Environment, EnvironmentFamily
from empo2_jax.envs.scienceworld_jvm import GOLD_FLAGS, VERSION, Jvm
from empo2_jax.envs.scienceworld_text import asks, example
from empo2_jax.prompts import tip_entry, tips_block
from empo2_jax.randomness import generator
from empo2_jax.types import Message, Task

KINDS = ("gold", "detours", "tips", "exploration")
_DETOURS = ("look around", "inventory", "wait1")
_HARMLESS_GOLD = ("go ", "open ", "look ")


class GoldPaths:
    """Solutions by (task, variation), from the cache or from a Java process started when first needed."""

    def __init__(self, simplification: str) -> None:
        self._simplification = simplification
        self._jvm: Jvm | None = None

    def actions(self, task: Task) -> list[str]:
        """The gold path of `task`, not cut at the end of the episode.

        Without opening doors that stand open, except where living things grow while the agent acts: two actions fewer,
        and a focus comes too early.
        """
        actions = self._cached(task)
        doors_stand_open = {"openDoors", "easy"} & set(self._simplification.split(","))
        if not doors_stand_open or task.name.startswith("identify-life-stages"):
            return actions
        return [action for action in actions if not action.startswith("open door")]

    def _cached(self, task: Task) -> list[str]:
        name = f"{task.name}-{task.variation}-{self._simplification or 'full'}.json"
        path = cache_folder("scienceworld-gold", VERSION, name)
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        if self._jvm is None:
            self._jvm = Jvm(GOLD_FLAGS, timeout_s=300.0)
        actions = self._jvm.gold_actions(task.name, task.variation, self._simplification)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(actions), encoding="utf-8")
        partial.replace(path)
        return actions

    def close(self) -> None:
        """End the Java process if one was started."""
        if self._jvm is not None:
            self._jvm.kill()
            self._jvm = None


def worked_example(family: EnvironmentFamily, task: Task) -> str:
    """The solution of `task` as text for a prompt, cut where the episode ends."""
    environment, taken = family.make(), []
    try:
        environment.reset(task, 0)
        for action in family.solution(task):
            taken.append(action)
            if environment.step(action).done:
                break
        return example(environment.goal, taken)
    finally:
        environment.close()


class Demonstrator:
    """Makes chats from tasks of a family, played in one of its environments."""

    def __init__(self, family: EnvironmentFamily, simplification: str) -> None:
        self._family = family
        self._gold = GoldPaths(simplification)

    def chats(self, tasks: Sequence[Task], count: int, seed: int, kinds: Sequence[str] = KINDS) -> list[list[Message]]:
        """`count` chats over `tasks` in an order drawn from `seed`; `kinds` take turns, shifted from round to round."""
        order = generator(seed, "demonstrations").permutation(len(tasks))
        environment = self._family.make()
        try:
            return [
                self._chat(environment, tasks[order[place]], kinds[(place + turn) % len(kinds)], seed, number)
                for number in range(count)
                for turn, place in [divmod(number, len(tasks))]
            ]
        finally:
            environment.close()
            self._gold.close()

    def _chat(self, environment: Environment, task: Task, kind: str, seed: int, number: int) -> list[Message]:
        gold = self._gold.actions(task)
        rng = generator(seed, "demonstration", number)
        actions, earlier = gold, []
        if kind == "tips":
            earlier = gold
        elif kind == "detours":
            actions = detours(gold, rng)
        elif kind == "exploration":
            actions = exploration(gold, rng)
            earlier = exploration(gold, rng) if rng.random() < 0.5 else []
        return self._play(environment, task, actions, self._told(environment, task, earlier))[2]

    def _told(self, environment: Environment, task: Task, actions: Sequence[str]) -> list[str]:
        """What memory shows of an earlier episode of these actions; nothing without actions."""
        if not actions:
            return []
        score, steps, _ = self._play(environment, task, actions)
        return [tip_entry(self._family.scripted_tip(environment.goal, steps, score), steps[-1][0], score)]

    def _play(
        self, environment: Environment, task: Task, actions: Sequence[str], tips: Sequence[str] = ()
    ) -> tuple[float, list[tuple[str, str]], list[Message]]:
        """Final score, (action, reply) pairs and the chat of `actions`, cut where it ends; `tips` in each turn."""
        observation = environment.reset(task, 0)
        opening = self._family.first_turn(environment.goal, observation.text)
        chat = [Message("user", opening + tips_block(tips))]
        steps: list[tuple[str, str]] = []
        for number, action in enumerate(actions):
            if action.isdigit() and not asks(observation.text):
                continue  # the environment has settled the choice itself
            observation = environment.step(action)
            steps.append((action, observation.text))
            chat.append(Message("assistant", action))
            if observation.done or number + 1 == len(actions):
                break
            chat.append(Message("user", self._family.next_turn(observation.text) + tips_block(tips)))
        chat.append(Message("user", self._family.tip_request(observation.text, observation.score)))
        chat.append(Message("assistant", self._family.scripted_tip(environment.goal, steps, observation.score)))
        return observation.score, steps, chat


def detours(gold: Sequence[str], rng: np.random.Generator) -> list[str]:
    """The path with one or two harmless actions put before its last one, never before the answer to a choice."""
    path = list(gold)
    for _ in range(int(rng.integers(1, 3))):
        places = [place for place, action in enumerate(path) if not action.isdigit()]
        path.insert(places[int(rng.integers(len(places)))], _DETOURS[int(rng.integers(len(_DETOURS)))])
    return path


def exploration(gold: Sequence[str], rng: np.random.Generator) -> list[str]:
    """A stay on the way of the path that tries deeds of it blindly: one in every second stay, one in every eighth.

    They are drawn on their own, so that one stay in 64 does two in the right order, a solution where there are no
    others. None is tried where one alone is the solution.
    """
    walk = [action for action in gold if action.startswith(_HARMLESS_GOLD)][:4]
    deeds = [action for action in gold if not action.startswith((*_HARMLESS_GOLD, "wait")) and not action.isdigit()]
    chances = (1 / 2, 1 / 8) if len(deeds) > 1 else ()
    tried = [str(rng.choice(deeds)) for chance in chances if rng.random() < chance]
    return [*walk, *(tried or [str(rng.choice(_DETOURS))]), "look around"]
