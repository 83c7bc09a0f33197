"""Any text environment of Gymnasium's form: `reset(seed=…)` and a five-tuple `step`, on strings.

It takes whatever has these two methods, so the package `gymnasium` itself is not needed. A task is a name with a
factory; its variation is the seed of the reset. Rewards are multiplied by `scale`, so that a perfect episode has
100 points. `from_config` is missing on purpose: a factory cannot stand in TOML, so a module of one's own offers it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from empo2_jax.envs.simple import SimpleFamily
from empo2_jax.errors import ConfigError, EnvError
from empo2_jax.types import Observation, Task


@runtime_checkable
class TextGymnasium(Protocol):
    """What is wrapped. `info` may have `admissible_actions`, `goal` and `success`."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """First observation and info."""
        ...

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, info."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class GymnasiumEnvironment:
    """One wrapped environment per task met; `goal` is the info's, else the task's name."""

    def __init__(self, name: str, factories: Mapping[str, Callable[[], TextGymnasium]], scale: float) -> None:
        self.goal = ""
        self._name, self._factories, self._scale = name, factories, scale
        self._made: dict[str, TextGymnasium] = {}
        self._current = ""
        self._info: dict[str, Any] = {}
        self._last: Observation | None = None
        self._lock = threading.RLock()  # `close` from another thread waits for the call that runs

    def reset(self, task: Task, seed: int) -> Observation:
        """Start `task`; its variation seeds the world, so `seed` is not used."""
        if task.name not in self._factories:
            raise EnvError(f"{task}: no such task; there are {', '.join(self._factories)}")
        with self._lock:
            if task.name not in self._made:
                self._made[task.name] = self._factories[task.name]()
            self._current = task.name
            text, self._info = self._made[task.name].reset(seed=task.variation)
            self.goal = str(self._info.get("goal", task.name))
            self._last = Observation(str(text), 0.0, 0.0, False, False, str(text))
            return self._last

    def step(self, action: str) -> Observation:
        """Hand `action` on, stripped; it is invalid where the info lists admissible actions without it."""
        with self._lock:
            return self._step(action)

    def _step(self, action: str) -> Observation:
        last = self._last
        if last is None or last.done:
            raise EnvError(f"{self._name}: no episode is running, reset first")
        sent = action.strip()
        listed = self._info.get("admissible_actions")
        valid = listed is None or sent in listed
        text, points, terminated, truncated, self._info = self._made[self._current].step(sent)
        score = last.score + self._scale * float(points)
        success = bool(self._info.get("success", terminated and score >= 100.0))
        resolution = "exact" if valid else "invalid"
        done = bool(terminated or truncated)
        self._last = Observation(str(text), score - last.score, score, done, success, str(text), sent, resolution)
        return self._last

    def admissible_actions(self) -> Sequence[str]:
        """Those that the info lists, sorted; [] where it lists none."""
        return sorted(map(str, self._info.get("admissible_actions") or ()))

    def close(self) -> None:
        """Close every wrapped environment."""
        with self._lock:
            made, self._made, self._last = self._made, {}, None
            for environment in made.values():
                environment.close()


class GymnasiumFamily(SimpleFamily):
    """Tasks by name, each with so many seeds per split; the splits follow each other without a gap."""

    def __init__(
        self,
        name: str,
        factories: Mapping[str, Callable[[], TextGymnasium]],
        *,
        splits: Mapping[str, int],
        scale: float = 100.0,
    ) -> None:
        """`splits` says how many variations "train", "dev" and "test" have; `scale` turns a reward into points."""
        if set(splits) != {"train", "dev", "test"} or not factories:
            raise ConfigError(f"{name}: a task and the sizes of train, dev and test are needed")
        self.name = name
        self._factories, self._splits, self._scale = dict(factories), dict(splits), scale

    def tasks(self, split: str) -> list[Task]:
        """By task, then variation."""
        if split not in self._splits:
            raise ConfigError(f"{self.name}: unknown split {split!r}; allowed: train, dev, test")
        order = ("train", "dev", "test")
        first = sum(self._splits[before] for before in order[: order.index(split)])
        return [
            Task(self.name, name, first + number) for name in self._factories for number in range(self._splits[split])
        ]

    def make(self) -> GymnasiumEnvironment:
        """A new wrapper; what it wraps is made at the first reset."""
        return GymnasiumEnvironment(self.name, self._factories, self._scale)
