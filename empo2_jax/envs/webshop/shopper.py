"""Chats for the supervised warm start: a scripted shopper that searches with the words of the wish and buys the best.

It sees what the policy sees and judges the results with the reward itself. Three kinds take turns: the straight way;
with a look at a sub page first; after a tip that an earlier success wrote. Each closes with the request for a tip.
"""

import re
from collections.abc import Mapping, Sequence

from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.envs.webshop import pages
from empo2_jax.envs.webshop.environment import WebShopEnvironment
from empo2_jax.envs.webshop.goals import Goal
from empo2_jax.envs.webshop.nouns import Nouns
from empo2_jax.envs.webshop.product import Product
from empo2_jax.envs.webshop.reward import alike, first_color, likeness, reward
from empo2_jax.prompts import tip_entry, tips_block
from empo2_jax.randomness import generator
from empo2_jax.types import Message, Task

KINDS = ("straight", "look", "tip")

_FILLER = re.compile(
    r"\b(?:i|am|i'm|looking|need|want|would|like|please|find|me|buy|to|for|a|an|the|some|that|which|is|are|and|with|in|"
    r"of|it|should|be|price|lower|than|dollars|size|color|my)\b|[^\w\s]",
    re.IGNORECASE,
)


class Shopper:
    """Makes chats from goals of a family, played in one of its environments."""

    def __init__(
        self, family: EnvironmentFamily, environment: WebShopEnvironment, shop: pages.Shop, nouns: Nouns
    ) -> None:
        self._family, self._environment, self._shop, self._nouns = family, environment, shop, nouns

    def chats(self, tasks: Sequence[Task], count: int, seed: int, kinds: Sequence[str] = KINDS) -> list[list[Message]]:
        """`count` chats over `tasks` in an order drawn from `seed`; `kinds` take turns."""
        order = generator(seed, "demonstrations").permutation(len(tasks))
        return [self._chat(tasks[order[number % len(tasks)]], kinds[number % len(kinds)]) for number in range(count)]

    def _chat(self, task: Task, kind: str) -> list[Message]:
        self._environment.reset(task, 0)
        assert self._environment.wanted is not None
        answers = plan(self._environment.wanted, self._shop, self._nouns, look=kind == "look")
        if kind != "tip":
            return self._play(task, answers)[2]
        score, steps, _ = self._play(task, answers)
        tip = self._family.scripted_tip(self._environment.goal, steps, score)
        return self._play(task, answers, [tip_entry(tip, answers[0].splitlines()[-1], score)])[2]

    def _play(
        self, task: Task, answers: Sequence[str], tips: Sequence[str] = ()
    ) -> tuple[float, list[tuple[str, str]], list[Message]]:
        """Final score, (answer, observation) pairs and the chat."""
        family, environment = self._family, self._environment
        observation = environment.reset(task, 0)
        chat = [Message("user", family.first_turn(environment.goal, observation.text) + tips_block(tips))]
        steps: list[tuple[str, str]] = []
        for answer in answers:
            observation = environment.step(answer)
            steps.append((answer, observation.text))
            chat.append(Message("assistant", answer))
            if not observation.done:
                chat.append(Message("user", family.next_turn(observation.text)))
        chat.append(Message("user", family.tip_request(observation.text, observation.score)))
        chat.append(Message("assistant", family.scripted_tip(environment.goal, steps, observation.score)))
        return observation.score, steps, chat


def plan(goal: Goal, shop: pages.Shop, nouns: Nouns, look: bool = False) -> list[str]:
    """Answers (thought, then action) that search, go to the best result, choose its options and buy it."""
    wanted = shop.product(goal.product)
    query = query_words(goal.instruction)
    hits = shop.search(query)
    if not hits:
        query, hits = wanted.query, shop.search(wanted.query) or [goal.product]
    worth = {hit: _worth(shop.product(hit), goal, wanted, nouns) for hit in hits}
    place = max(range(len(hits)), key=lambda index: (worth[hits[index]], -index))
    product = shop.product(hits[place])
    answers = [f"The wish names what matters: I search for it.\nsearch[{query}]"]
    answers += ["Nothing here fits as well as it could: I look on.\nclick[next >]"] * (place // pages.PER_PAGE)
    answers.append(f"{product.title[:80]} fits the wish best.\nclick[{product.asin.lower()}]")
    if look:
        answers.append("I check its features first.\nclick[features]")
        answers.append("They are what was asked for: back to the options.\nclick[< prev]")
    answers += [f"The wish asks for {value}.\nclick[{value}]" for value in choices(product, goal).values()]
    return [*answers, "Product, options and price are settled: I buy it.\nclick[buy now]"]


def query_words(instruction: str) -> str:
    """The words of a wish that a search engine can use."""
    wish = instruction.partition(", and price lower than")[0]
    return " ".join(_FILLER.sub(" ", wish.lower()).split())[: pages.LONGEST] or wish.lower()


def choices(product: Product, goal: Goal) -> Mapping[str, str]:
    """The value most like each wished option, by group; at most one per group."""
    chosen: dict[str, str] = {}
    for option in goal.options:
        rated = [
            (value == option, likeness(value, option), group, value)
            for group, values in product.options.items()
            if group not in chosen
            for value in values
            if alike(first_color(value), first_color(option))
        ]
        if rated:
            _, _, group, value = max(rated, key=lambda item: item[:2])
            chosen[group] = value
    return chosen


def _worth(product: Product, goal: Goal, wanted: Product, nouns: Nouns) -> float:
    return reward(product, tuple(choices(product, goal).values()), goal, wanted, nouns).total
