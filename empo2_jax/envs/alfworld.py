"""ALFWorld's text games: household tasks in one room at a time (Shridhar et al., 2021), played without its package.

Not in the paper. Tasks are the six kinds of the data, variations are games: from 0 those of `train`, from 10,000 of
`valid_seen` (split "dev"), from 20,000 of `valid_unseen` (split "test"). The data is not part of this package
(`alfworld_data`); a usual step limit is 50. A success is 100 points, where ALFWorld's own reward is 1.
"""

import difflib
from collections.abc import Mapping, Sequence

from empo2_jax.config import EnvConfig
from empo2_jax.envs.alfworld_data import FOLDERS, KINDS, Games, counted, find_data, read_game
from empo2_jax.envs.alfworld_game import MAX_SCORE, AlfWorldGame, planner
from empo2_jax.envs.simple import SimpleFamily
from empo2_jax.envs.text_game import GameEnvironment
from empo2_jax.errors import ConfigError, DataError, EnvError
from empo2_jax.types import Task

NAME = "alfworld"


class AlfWorldFamily(SimpleFamily):
    """Games of some kinds."""

    name = NAME
    max_score = MAX_SCORE
    instruction = (
        "You are in a house and have a task there. Things are named by kind and number; what is in a closed thing is "
        "seen once it is open, and you can carry one thing. Each turn, answer with one action and nothing else."
    )

    def __init__(self, games: Games, kinds: Sequence[str], counts: Mapping[str, int]) -> None:
        """Raises `DataError` for a game among those asked for that cannot be read."""
        self._games = games
        self._tasks = {
            split: [Task(NAME, kind, number) for kind in kinds for number in games.first(split, kind, counts[split])]
            for split in FOLDERS
        }

    def tasks(self, split: str) -> list[Task]:
        """The first games of the split that can be solved, by kind."""
        if split not in self._tasks:
            raise ConfigError(f"{NAME}: unknown split {split!r}; allowed: {', '.join(self._tasks)}")
        return list(self._tasks[split])

    def task(self, name: str, variation: int) -> Task:
        """Any game of any kind and split that can be solved."""
        path = self._games.path(_kind(name), variation)
        if not read_game(path).solvable:
            raise ConfigError(f"{NAME}/{name}/{variation}: {path} says that it cannot be solved")
        return Task(NAME, name, variation)

    def solution(self, task: Task) -> list[str]:
        """The walkthrough of the file; [] where it has none (the engine's own planner may take minutes)."""
        return list(read_game(self._games.path(_kind(task.name), task.variation)).walkthrough)

    def make(self) -> GameEnvironment:
        """An environment without a game."""
        return GameEnvironment(NAME, self._begin)

    def _begin(self, task: Task) -> AlfWorldGame:
        try:
            return AlfWorldGame(read_game(self._games.path(_kind(task.name), task.variation)))
        except (ConfigError, DataError, EnvError) as error:
            raise EnvError(f"{task}: {error}") from error


def family(
    *, data: str = "", tasks: Sequence[str] = (), train: int = 5, dev: int = 20, test: int = 20
) -> AlfWorldFamily:
    """Games of the kinds `tasks` (default: all six), so many per kind and split, fewer where fewer exist.

    Raises:
        ConfigError: an unknown kind, no such data folder, or one without a split.
        DataError: a game that cannot be read.
        EnvError: TextWorld or its planner is not installed.
    """
    planner()
    kinds = [_kind(task) for task in tasks] or list(KINDS)
    return AlfWorldFamily(Games(find_data(data)), kinds, {"train": train, "dev": dev, "test": test})


def from_config(config: EnvConfig, *, panel: int, workers: int) -> AlfWorldFamily:
    """The family that `[env]` describes, with `panel` games per kind to evaluate on; `workers` does not matter."""
    return family(data=config.data, tasks=config.tasks, train=config.train_variations, dev=panel, test=panel)


def about_data(config: EnvConfig) -> list[str]:
    """Where the data is and how much of the published set, for `empo2 envs check`; reads every game."""
    games = Games(find_data(config.data))
    return [f"data in {games.root}", *counted(games)]


def _kind(name: str) -> str:
    if name not in KINDS:
        near = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{NAME} has no task {name!r}; the nearest is {near!r}")
    return name
