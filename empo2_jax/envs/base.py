"""The environment protocol: one text world, one episode at a time.

An environment owns its prompts: the text of the first turn, of later turns and of the request for a tip. It knows
nothing of tokens, memory or learning. Instances are not thread-safe; the collector steps each from one thread at a
time. A failure of the simulator raises `EnvError`; a bad action is an ordinary observation.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from empo2_jax.types import Message, Observation, Task


@runtime_checkable
class Environment(Protocol):
    """One text world. `reset` before everything else."""

    goal: str  # task description of the current episode

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode of `task`; `seed` decides whatever the world draws."""
        ...

    def step(self, action: str) -> Observation:
        """Resolve and apply free text; the observation tells what was sent to the world and how it was resolved."""
        ...

    def admissible_actions(self) -> Sequence[str]:
        """All actions the world would accept now, sorted. May be slow: ask only when needed."""
        ...

    def close(self) -> None:
        """Release everything; safe to call twice."""
        ...


@runtime_checkable
class EnvironmentFamily(Protocol):
    """What `from_config` of an environment module gives for `[env]`: tasks, prompts, and shared environments."""

    name: str
    max_score: float  # points of a perfect episode
    demonstration_kinds: tuple[str, ...]  # what `demonstrations` can be limited to; () where all are of one kind

    def tasks(self, split: str) -> list[Task]:
        """Tasks of "train", "dev" or "test" in a fixed order, as configured."""
        ...

    def task(self, name: str, variation: int) -> Task:
        """The problem of this name and number, of any split; raises `ConfigError` that says what is there."""
        ...

    def solution(self, task: Task) -> list[str]:
        """Actions that reach `max_score`, for checks and demonstrations; [] where none is known."""
        ...

    def vocabulary(self) -> list[str]:
        """Every word of a world whose language is closed, in a fixed order; [] where it is open."""
        ...

    def make(self) -> Environment:
        """A new environment, or one from the pool."""
        ...

    def system_prompt(self) -> str:
        """System message; "" for the model's own default."""
        ...

    def first_turn(self, goal: str, observation: str) -> str:
        """User turn that opens an episode, with the answer instruction; tips are appended by the collector."""
        ...

    def next_turn(self, observation: str) -> str:
        """User turn after an action."""
        ...

    def tip_request(self, observation: str, score: float) -> str:
        """User turn after the last action: what it led to, and the request for one tip (paper appendix; own words)."""
        ...

    def memory_key(self, goal: str, state: str) -> str:
        """Text whose embedding is the key of a memory entry (task, latest observation, inventory)."""
        ...

    def scripted_tip(self, goal: str, steps: Sequence[tuple[str, str]], score: float) -> str:
        """A tip by rule for tests and named options; (action, observation after it) pairs. "" where none exists."""
        ...

    def demonstrations(self, split: str, count: int, seed: int, kinds: Sequence[str] = ()) -> list[list[Message]]:
        """Chats for the supervised warm start, made on `split`; loss falls on the assistant turns.

        They are of `kinds` in turn, some of `demonstration_kinds`, or of all.
        """
        ...

    def close(self) -> None:
        """Release shared resources; no process outlives this call."""
        ...
