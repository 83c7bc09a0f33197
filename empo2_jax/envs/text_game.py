"""An environment around one text game at a time, whatever engine plays it: TextWorld's generated games and ALFWorld's.

An engine says what a command led to; here are the rules that all environments keep: a reset first, an end that is
final, refused text as an ordinary observation, one call at a time, and a `close` that waits for the call that runs.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from empo2_jax.envs.actions import How, normalize
from empo2_jax.errors import EnvError
from empo2_jax.types import Observation, Task

NOTHING = "Nothing happens."


class Said(NamedTuple):
    """What a command led to."""

    text: str
    score: float  # points since the beginning
    done: bool
    success: bool
    how: How


@runtime_checkable
class Game(Protocol):
    """A game that has begun."""

    goal: str

    def opening(self) -> str:
        """What the player reads first."""
        ...

    def view(self) -> str:
        """Where the player stands and what they hold, without taking a step."""
        ...

    def commands(self) -> Sequence[str]:
        """What the game accepts now, sorted."""
        ...

    def send(self, command: str) -> Said:
        """Apply a command: one line of lower-case text, not empty."""
        ...

    def close(self) -> None:
        """Release everything; called once."""
        ...


class GameEnvironment:
    """One game at a time; `close` from another thread waits for the call that runs."""

    def __init__(self, name: str, begin: Callable[[Task], Game]) -> None:
        """`begin` starts the game of a task, or raises `EnvError`."""
        self.goal = ""
        self._name, self._begin = name, begin
        self._lock = threading.RLock()
        self._game: Game | None = None
        self._last: Observation | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        """Start the game of `task`; nothing is drawn, so `seed` does not matter."""
        with self._lock:
            self.close()
            self._game = self._begin(task)
            self.goal = self._game.goal
            self._last = Observation(self._game.opening(), 0.0, 0.0, False, False, self._game.view())
            return self._last

    def step(self, action: str) -> Observation:
        """Apply `action`; what the game refuses costs nothing."""
        with self._lock:
            if self._game is None or self._last is None:
                raise EnvError(f"{self._name}: step before a reset")
            self._last = self._stepped(self._game, self._last, normalize(action))
            return self._last

    def admissible_actions(self) -> Sequence[str]:
        """What the game accepts now."""
        with self._lock:
            return self._game.commands() if self._game and self._last and not self._last.done else []

    def close(self) -> None:
        """End the game."""
        with self._lock:
            game, self._game, self._last = self._game, None, None
            if game is not None:
                game.close()

    def _stepped(self, game: Game, last: Observation, command: str) -> Observation:
        if last.done or not command:
            return Observation(NOTHING, 0.0, last.score, last.done, last.success, last.state, "", "invalid")
        said = game.send(command)
        return Observation(
            text=said.text,
            reward=said.score - last.score,
            score=said.score,
            done=said.done,
            success=said.success,
            state=game.view(),
            resolved=command,
            resolution=said.how,
        )
