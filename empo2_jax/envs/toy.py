"""The hidden-bulb house: a text world of two secrets in which exploration is needed and a tip helps.

A house is dark. The bulb lies in one of 16 places and fits the lamp of one of 8 rooms; three actions must do. Finding
the bulb is worth 30 points, lighting the lamp 70. Common sense (the start policy, see `demonstrations`) looks where
bulbs of such a house usually are; in the houses that are trained on they are elsewhere. Everything is plain sentences
over a closed vocabulary, so that a tiny model can read, act and write tips. Train and test houses are the same: the
world asks whether what memory found out ends up in the weights, not whether it generalizes.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from empo2_jax.config import EnvConfig
from empo2_jax.errors import ConfigError, EnvError
from empo2_jax.prompts import tip_entry, tips_block
from empo2_jax.randomness import generator
from empo2_jax.types import Message, Observation, Task

PLACES = (
    *("drawer", "cupboard", "shelf", "box", "oven", "fridge", "bathtub", "piano"),
    *("chimney", "aquarium", "mailbox", "vase", "boot", "teapot", "suitcase", "clock"),
)
ROOMS = ["kitchen", "hall", "attic", "cellar", "garage", "nursery", "library", "pantry"]
HOUSES = ["red", "green", "blue", "white", "black", "yellow", "brown", "pink"]
# The secrets of house v: never where common sense looks (`usual`).
SECRETS = tuple((PLACES[(3 * v + 7) % 16], ROOMS[(v + 2 + 5 * v % 6) % 8]) for v in range(len(HOUSES)))
SURPRISE = 0.01  # probability that the start policy, without a tip, tries anything unusual


def usual(house: str) -> tuple[list[str], list[str]]:
    """Where common sense looks in a house: four places and two rooms, other ones in every house."""
    number = HOUSES.index(house)
    return [PLACES[(2 * number + i) % 16] for i in range(4)], [ROOMS[(number + i) % 8] for i in range(2)]


@dataclass
class ToyHouse:
    """One house; see the module."""

    house: str = ""
    goal: str = ""
    secret: tuple[str, str] = ("", "")
    score: float = 0.0
    done: bool = True
    found: bool = False
    facts: list[str] = field(default_factory=list)

    def reset(self, task: Task, seed: int) -> Observation:
        """Start in house `task.variation`; nothing is drawn, so `seed` does not matter."""
        if task.name != "bulb" or not 0 <= task.variation < len(HOUSES):
            raise EnvError(f"{task}: the toy world has task bulb, variations 0 to {len(HOUSES) - 1}")
        return self.enter(HOUSES[task.variation], SECRETS[task.variation])

    def enter(self, house: str, secret: tuple[str, str]) -> Observation:
        """Start in a house with given secrets (used for demonstrations)."""
        self.house, self.goal = house, f"light the lamp of the {house} house ."
        self.secret, self.score, self.done, self.found, self.facts = secret, 0.0, False, False, []
        return self._observe("it is dark . the bulb is hidden .", 0.0, "exact", "")

    def step(self, action: str) -> Observation:
        """`look in the PLACE` or, with the bulb, `try the ROOM`, in free text; anything else changes nothing."""
        if self.done:
            raise EnvError("the episode is over: reset first")
        words = re.sub(r"[^a-z ]", " ", action.lower()).split()
        resolved = " ".join(words)
        if resolved not in self.admissible_actions():
            return self._observe("nothing happens .", 0.0, "invalid", "")
        target = words[-1]
        return self._look(target, resolved) if words[0] == "look" else self._fit(target, resolved)

    def _look(self, place: str, resolved: str) -> Observation:
        if place != self.secret[0]:
            self.facts.append(f"the bulb is not in the {place} .")
            return self._observe(f"the {place} is empty .", 0.0, "exact", resolved)
        self.found = True
        self.facts.append(f"the bulb is in the {place} .")
        return self._observe(f"the bulb was in the {place} .", 30.0, "exact", resolved)

    def _fit(self, room: str, resolved: str) -> Observation:
        if room != self.secret[1]:
            self.facts.append(f"the lamp is not in the {room} .")
            return self._observe(f"the {room} stays dark .", 0.0, "exact", resolved)
        self.done = True
        self.facts.append(f"the lamp is in the {room} .")
        return self._observe(f"the lamp in the {room} is on .", 70.0, "exact", resolved)

    def _observe(self, text: str, reward: float, resolution: str, resolved: str) -> Observation:
        self.score += reward
        return Observation(
            text, reward, self.score, self.done, self.score == 100.0, text, resolved=resolved, resolution=resolution
        )

    def admissible_actions(self) -> Sequence[str]:
        """Look anywhere while the bulb is missing, then try it in any room."""
        if self.done:
            return []
        actions = [f"try the {room}" for room in ROOMS] if self.found else [f"look in the {place}" for place in PLACES]
        return sorted(actions)

    def close(self) -> None:
        """Nothing to release."""


class ToyFamily:
    """All houses with their prompts."""

    name = "toy"
    max_score = 100.0
    demonstration_kinds: tuple[str, ...] = ()

    def __init__(self, variations: Sequence[int]):
        self._variations = tuple(variations)

    def tasks(self, split: str) -> list[Task]:
        """The same houses for every split."""
        return [Task(self.name, "bulb", variation) for variation in self._variations]

    def task(self, name: str, variation: int) -> Task:
        """House `variation`."""
        if name != "bulb" or not 0 <= variation < len(HOUSES):
            raise ConfigError(f"toy/{name}/{variation}: the toy world has task bulb, variations 0 to {len(HOUSES) - 1}")
        return Task(self.name, name, variation)

    def solution(self, task: Task) -> list[str]:
        """What the secrets of the house say."""
        place, room = SECRETS[task.variation]
        return [f"look in the {place}", f"try the {room}"]

    def vocabulary(self) -> list[str]:
        """Words and signs of the world, its prompts and its tips, in a fixed order."""
        texts = [
            tip_entry("the bulb is not in the lamp .", "look in the", 0.0),
            tips_block(["x"]),
            self.tip_request("", 0.0),
            "light the lamp of the house . it is dark . the bulb is hidden . nothing happens . is empty . was in "
            "stays on try the nothing",
            " ".join([*PLACES, *ROOMS, *HOUSES]),
            " ".join(str(number) for number in range(101)),
        ]
        return list(dict.fromkeys(re.findall(r"\w+|[^\w\s]", " ".join(texts).lower())))

    def make(self) -> ToyHouse:
        """A new house."""
        return ToyHouse()

    def system_prompt(self) -> str:
        """None."""
        return ""

    def first_turn(self, goal: str, observation: str) -> str:
        """Goal and first view; the world is small enough to need no list of actions."""
        return f"{goal} {observation}"

    def next_turn(self, observation: str) -> str:
        """The observation alone."""
        return observation

    def tip_request(self, observation: str, score: float) -> str:
        """Asks for one line of facts."""
        return f"{observation} the episode is over with score {score:.0f} . write one tip ."

    def memory_key(self, goal: str, state: str) -> str:
        """Goal and latest view."""
        return f"{goal} {state}"

    def scripted_tip(self, goal: str, steps: Sequence[tuple[str, str]], score: float) -> str:
        """The facts that the observations showed, in order, each once."""
        return " ".join(dict.fromkeys(fact for _, observation in steps if (fact := _fact(observation)))) or "nothing ."

    def demonstrations(self, split: str, count: int, seed: int, kinds: Sequence[str] = ()) -> list[list[Message]]:
        """Chats of an expert with a misleading prior, in houses of random names and secrets.

        A life is six episodes in one house whose memory begins with an insider's episode. Without tips the expert
        trusts common sense (`SURPRISE` of mass on all that is unusual); with tips it goes where a tip says something
        is, avoids where a tip says nothing is, and else prefers the usual. Every episode ends with its tip, and its
        memory shows tips as training does: best score first, ties newer first, one entry per episode.
        """
        chats: list[list[Message]] = []
        for life in range(-(-count // 6)):
            rng = generator(seed, "toy-life", split, life)
            secret = (PLACES[rng.integers(len(PLACES))], ROOMS[rng.integers(len(ROOMS))])
            house = HOUSES[rng.integers(len(HOUSES))]
            memory: list[tuple[float, list[str]]] = []
            self._demonstrate(house, secret, memory, [], _insider_knowledge(house, secret, rng), rng)
            for _ in range(6):
                tips = _recall(memory, rng) if rng.random() < 0.8 else []
                chats.append(self._demonstrate(house, secret, memory, tips, " ".join(tips), rng))
        return chats[:count]

    def _demonstrate(
        self,
        house: str,
        secret: tuple[str, str],
        memory: list[tuple[float, list[str]]],
        tips: list[str],
        knowledge: str,
        rng: np.random.Generator,
    ) -> list[Message]:
        """One episode of an expert who is shown `tips` and acts on `knowledge`; its entries go to `memory`."""
        world = ToyHouse()
        observation = world.enter(house, secret)
        text, messages, actions = self.first_turn(world.goal, observation.text), [], []
        for _ in range(3):
            messages.append(Message("user", text + tips_block(tips)))
            actions.append(_expert(world, knowledge, rng))
            messages.append(Message("assistant", actions[-1]))
            observation = world.step(actions[-1])
            text = self.next_turn(observation.text)
            if observation.done:
                break
        tip = " ".join(dict.fromkeys(world.facts))
        messages += [Message("user", self.tip_request(observation.text, world.score)), Message("assistant", tip)]
        memory.append((world.score, [tip_entry(tip, action, world.score) for action in actions]))
        return messages

    def close(self) -> None:
        """Nothing to release."""


def _insider_knowledge(house: str, secret: tuple[str, str], rng: np.random.Generator) -> str:
    """What somebody who was here before acts on: often the place, sometimes the room, sometimes only what is usual."""
    place, room = secret
    kind = rng.random()
    if kind < 0.3:
        return f"the bulb is in the {place} . the lamp is in the {room} ."
    if kind < 0.6:
        return f"the bulb is in the {place} ."
    return " ".join(f"the bulb is not in the {place} ." for place in usual(house)[0]) if kind < 0.8 else ""


def _recall(memory: Sequence[tuple[float, list[str]]], rng: np.random.Generator) -> list[str]:
    """One or two tips, best score first, ties newer first; mostly the entry of an episode's last action."""
    best = sorted(reversed(memory), key=lambda episode: -episode[0])[: rng.integers(1, 3)]
    return [entries[-1 if rng.random() < 0.7 else rng.integers(len(entries))] for _, entries in best]


def _fact(observation: str) -> str:
    for pattern, fact in (
        (r"the bulb was in the (\w+)", "the bulb is in the {} ."),
        (r"the (\w+) is empty", "the bulb is not in the {} ."),
        (r"the lamp in the (\w+) is on", "the lamp is in the {} ."),
        (r"the (\w+) stays dark", "the lamp is not in the {} ."),
    ):
        if match := re.search(pattern, observation):
            return fact.format(match[1])
    return ""


def _expert(world: ToyHouse, tips: str, rng: np.random.Generator) -> str:
    places, rooms = usual(world.house)
    thing, options, preferred, verb = (
        ("lamp", ROOMS, rooms, "try the") if world.found else ("bulb", PLACES, places, "look in the")
    )
    known = tips + " " + " ".join(world.facts)
    if match := re.search(rf"the {thing} is in the (\w+)", known):
        return f"{verb} {match[1]}"
    excluded = set(re.findall(rf"the {thing} is not in the (\w+)", known))
    left = [option for option in options if option not in excluded]
    likely = [option for option in left if option in preferred]
    unusual = [option for option in left if option not in preferred]
    pool = likely if likely and (rng.random() >= SURPRISE or not unusual) else unusual
    return f"{verb} {pool[rng.integers(len(pool))]}"


def family(*, tasks: Sequence[str] = (), variations: int = len(HOUSES)) -> ToyFamily:
    """The toy world with its first `variations` houses.

    Raises:
        ConfigError: an unknown task name or more variations than houses.
    """
    for task in tasks:
        if task != "bulb":
            near = difflib.get_close_matches(task, ["bulb"], n=1, cutoff=0.0)[0]
            raise ConfigError(f"env.tasks: the toy world has no task {task!r}; the nearest is {near!r}")
    if not 1 <= variations <= len(HOUSES):
        raise ConfigError(f"env.train_variations = {variations}: the toy world has 1 to {len(HOUSES)} houses")
    return ToyFamily(range(variations))


def from_config(config: EnvConfig, *, panel: int, workers: int) -> ToyFamily:
    """The family that `[env]` describes; `panel` and `workers` do not matter: the houses are few and cost nothing."""
    return family(tasks=config.tasks, variations=config.train_variations)
