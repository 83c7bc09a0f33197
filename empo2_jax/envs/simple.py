"""The plain part of an environment family: everything but its problems and its world. See docs/extending.md.

A family inherits from `SimpleFamily` and says `name`, `tasks` and `make`; what it wants otherwise it overrides.
"""

from collections.abc import Sequence

from empo2_jax.envs.base import Environment
from empo2_jax.errors import ConfigError
from empo2_jax.types import Message, Task


class SimpleFamily:
    """Prompts and defaults of a world of plain text."""

    name = ""
    max_score = 100.0
    demonstration_kinds: tuple[str, ...] = ()
    instruction = "You act in a text world. Each turn, answer with one action and nothing else."

    def tasks(self, split: str) -> list[Task]:
        """To be written: the problems of "train", "dev" and "test" in a fixed order."""
        raise NotImplementedError

    def make(self) -> Environment:
        """To be written: a new world."""
        raise NotImplementedError

    def task(self, name: str, variation: int) -> Task:
        """The problem among those of all splits."""
        known = [task for split in ("train", "dev", "test") for task in self.tasks(split)]
        if (wanted := Task(self.name, name, variation)) not in known:
            names = ", ".join(dict.fromkeys(task.name for task in known))
            raise ConfigError(f"{wanted}: no such problem; the tasks are {names}")
        return wanted

    def solution(self, task: Task) -> list[str]:
        """None is known."""
        return []

    def vocabulary(self) -> list[str]:
        """None: the language is open."""
        return []

    def system_prompt(self) -> str:
        """The model's own default."""
        return ""

    def first_turn(self, goal: str, observation: str) -> str:
        """Instruction, goal and first view."""
        return f"{self.instruction}\nTask: {goal}\n{observation}"

    def next_turn(self, observation: str) -> str:
        """The observation alone."""
        return observation

    def tip_request(self, observation: str, score: float) -> str:
        """The last observation and the request for one tip."""
        return (
            f"{observation}\nThe episode is over with a score of {score:g} out of {self.max_score:g}. Write one tip "
            "for the next attempt: one sentence saying what happened, what you learned and what was missing."
        )

    def memory_key(self, goal: str, state: str) -> str:
        """Goal and latest view."""
        return f"{goal}\n{state}"

    def scripted_tip(self, goal: str, steps: Sequence[tuple[str, str]], score: float) -> str:
        """The actions taken and what they led to; "" without steps."""
        taken = ", ".join(dict.fromkeys(action for action, _ in steps))
        return f"I did {taken} and reached {score:g} of {self.max_score:g}." if steps else ""

    def demonstrations(self, split: str, count: int, seed: int, kinds: Sequence[str] = ()) -> list[list[Message]]:
        """Solutions of the split's problems played in the world, each ended by a tip; [] where none is known."""
        tasks = self.tasks(split)
        solved = [(task, path) for task in tasks[:count] if (path := self.solution(task))]
        return [self._shown(*solved[(seed + number) % len(solved)]) for number in range(count)] if solved else []

    def close(self) -> None:
        """Nothing is shared."""

    def _shown(self, task: Task, path: Sequence[str]) -> list[Message]:
        environment = self.make()
        try:
            observation = environment.reset(task, 0)
            turn, chat, steps = self.first_turn(environment.goal, observation.text), [], []
            for action in path:
                observation = environment.step(action)
                chat += [Message("user", turn), Message("assistant", action)]
                steps.append((action, observation.text))
                turn = self.next_turn(observation.text)
                if observation.done:
                    break
            tip = self.scripted_tip(environment.goal, steps, observation.score)
            request = self.tip_request(observation.text, observation.score)
            return [*chat, Message("user", request), Message("assistant", tip)]
        finally:
            environment.close()
