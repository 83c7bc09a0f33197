"""WebShop as a family: its goals by split, its prompts, its demonstrations; made by `webshop.family`."""

from collections.abc import Mapping, Sequence

from empo2_jax.envs.webshop import text
from empo2_jax.envs.webshop.catalogue import Catalogue
from empo2_jax.envs.webshop.environment import MAX_SCORE, NAME, WebShopEnvironment, known
from empo2_jax.envs.webshop.goals import Goals
from empo2_jax.envs.webshop.nouns import Nouns
from empo2_jax.envs.webshop.shopper import KINDS, Shopper, plan
from empo2_jax.errors import ConfigError
from empo2_jax.types import Message, Task

SPLITS = ("train", "dev", "test")


class WebShopFamily:
    """Goals, prompts and environments; made by `webshop.family`."""

    name = NAME
    max_score = MAX_SCORE
    demonstration_kinds: tuple[str, ...] = KINDS

    def __init__(
        self,
        catalogue: Catalogue,
        goals: Mapping[str, Goals],
        nouns: Nouns,
        *,
        train: int | None = None,
        panel: int | None = None,
        penalty: float = 0.0,
        readable: bool = False,
    ) -> None:
        self.catalogue, self.goals, self.nouns = catalogue, goals, nouns
        self._counts = {"train": train, "dev": panel, "test": panel}
        self._penalty, self._readable = penalty, readable

    def tasks(self, split: str) -> list[Task]:
        """Goals of "train", "dev" or "test": the configured number of each kind, from the start of the split."""
        if split not in SPLITS:
            raise ConfigError(f"webshop: unknown split {split!r}; allowed: {', '.join(SPLITS)}")
        count = self._counts[split]
        tasks = [Task(NAME, name, place) for name, kind in self.goals.items() for place in kind.split(split)[:count]]
        if not tasks:
            raise ConfigError(f"webshop: too few goals for a {split} split: {sum(map(len, self.goals.values()))}")
        return tasks

    def task(self, name: str, variation: int) -> Task:
        """The goal of this kind at this position, of any split; raises `ConfigError` that says what is there."""
        if name not in self.goals or not 0 <= variation < len(self.goals[name]):
            raise ConfigError(f"{NAME}/{name}/{variation}: {known(self.goals)}")
        return Task(NAME, name, variation)

    def solution(self, task: Task) -> list[str]:
        """Actions of the scripted shopper if they reach `max_score`; [] if it knows none."""
        environment = self.make()
        environment.reset(task, 0)
        assert environment.wanted is not None
        answers = plan(environment.wanted, self.catalogue, self.nouns)
        actions = [answer.splitlines()[-1] for answer in answers]
        return actions if [environment.step(action) for action in actions][-1].success else []

    def vocabulary(self) -> list[str]:
        """None: the language is open."""
        return []

    def make(self) -> WebShopEnvironment:
        """A new shopper."""
        return WebShopEnvironment(self.catalogue, self.goals, self.nouns, self._penalty, self._readable)

    def system_prompt(self) -> str:
        """The model's own default."""
        return ""

    def first_turn(self, goal: str, observation: str) -> str:
        """Role, wish, page and possible actions."""
        return text.OPENING.format(goal=goal, observation=observation)

    def next_turn(self, observation: str) -> str:
        """Page and possible actions."""
        return observation

    def tip_request(self, observation: str, score: float) -> str:
        """The last page and the request for one tip."""
        return text.TIP_REQUEST.format(observation=observation, score=score)

    def memory_key(self, goal: str, state: str) -> str:
        """Goal, then page: the same wish on another page has another key."""
        return f"{goal}\n{state}"

    def scripted_tip(self, goal: str, steps: Sequence[tuple[str, str]], score: float) -> str:
        """A truthful sentence by rule from (answer, observation) pairs; "" without steps."""
        return text.scripted_tip(steps, score)

    def demonstrations(self, split: str, count: int, seed: int, kinds: Sequence[str] = ()) -> list[list[Message]]:
        """`count` chats of a scripted shopper on goals of `split`, see `shopper`; repeatable."""
        shopper = Shopper(self, self.make(), self.catalogue, self.nouns)
        return shopper.chats(self.tasks(split), count, seed, kinds or KINDS)

    def close(self) -> None:
        """Nothing to release."""
