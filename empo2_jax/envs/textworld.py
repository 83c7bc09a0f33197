"""TextWorld: houses generated offline from a size and a seed, played in their own Z-machine (Côté et al., 2018).

Not in the paper: a second real environment for tests and first experiments. Tasks are sizes, a variation is the seed
of the generator; games are made once (seconds) and cached. The score is the share of the quest's points, out of 100.
"""

import importlib
import tempfile
import threading
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from empo2_jax.cache import cache_folder
from empo2_jax.config import EnvConfig
from empo2_jax.envs.simple import SimpleFamily
from empo2_jax.envs.text_game import NOTHING, GameEnvironment, Said
from empo2_jax.errors import ConfigError, EnvError
from empo2_jax.types import Task

NAME = "textworld"
MAX_SCORE = 100.0


class Size(NamedTuple):
    """What the generator is asked for."""

    rooms: int
    objects: int
    quest_length: int  # actions


SIZES = {"small": Size(2, 4, 3), "medium": Size(4, 8, 5), "large": Size(8, 14, 8)}
SPLITS = {"train": range(0, 1000), "dev": range(1000, 1100), "test": range(1100, 1200)}  # seeds

_LOCK = threading.Lock()  # the generator and Python's warning filters are shared
_ASKED = ("admissible_commands", "description", "inventory", "objective", "feedback")
_FIGURES = ("score", "max_score", "won", "lost", "policy_commands")
_REFUSALS = ("That's not a verb", "You can't see any such thing", "I didn't understand", "I only understood you as far")


class TextWorldGame:
    """A generated game in its Z-machine; milliseconds per command."""

    def __init__(self, task: Task) -> None:
        self._game = _start(game_file(task), (*_ASKED, *_FIGURES))
        self._state = self._game.reset()
        self.goal = " ".join(self._state["objective"].split())

    def opening(self) -> str:
        """Room and inventory."""
        return self.view()

    def view(self) -> str:
        """Room and inventory."""
        return f"{' '.join(self._state['description'].split())}\n{' '.join(self._state['inventory'].split())}"

    def commands(self) -> list[str]:
        """What the game accepts now, sorted."""
        return sorted(self._state["admissible_commands"])

    def send(self, command: str) -> Said:
        """Apply a command: control characters would hang the Z-machine, and it takes 197 bytes."""
        command = command.encode()[:197].decode(errors="ignore").strip()
        exact = command in self._state["admissible_commands"]
        self._state, _, done = self._game.step(command)
        text = " ".join(self._state["feedback"].partition("\n>")[0].split()) or NOTHING
        score = MAX_SCORE * self._state["score"] / (self._state["max_score"] or 1)
        refused = not exact and text.startswith(_REFUSALS)
        how = "exact" if exact else "invalid" if refused else "engine"
        return Said(text, score, bool(done), bool(self._state["won"]), how)

    def close(self) -> None:
        """End the game."""
        self._game.close()


class TextWorldFamily(SimpleFamily):
    """Games of some sizes."""

    name = NAME

    def __init__(self, sizes: Sequence[str], counts: dict[str, int]) -> None:
        self._sizes, self._counts = tuple(sizes), counts

    def tasks(self, split: str) -> list[Task]:
        """The first seeds of the split, by size."""
        if split not in SPLITS:
            raise ConfigError(f"{NAME}: unknown split {split!r}; allowed: {', '.join(SPLITS)}")
        numbers = SPLITS[split][: self._counts[split]]
        return [Task(NAME, size, number) for size in self._sizes for number in numbers]

    def task(self, name: str, variation: int) -> Task:
        """Any size with any seed of a split."""
        if name not in SIZES or not 0 <= variation < SPLITS["test"].stop:
            last = SPLITS["test"].stop - 1
            raise ConfigError(f"{NAME}/{name}/{variation}: the tasks are {', '.join(SIZES)}, variations 0 to {last}")
        return Task(NAME, name, variation)

    def solution(self, task: Task) -> list[str]:
        """The walkthrough that the generator knows."""
        game = _start(game_file(task), ("policy_commands",))
        try:
            return list(game.reset()["policy_commands"])
        finally:
            game.close()

    def make(self) -> GameEnvironment:
        """An environment without a game."""
        return GameEnvironment(NAME, TextWorldGame)


def package() -> Any:
    """TextWorld itself, imported when first needed: it takes seconds and is an extra."""
    try:
        return importlib.import_module("textworld")
    except ImportError as error:
        raise EnvError(f"textworld is not installed ({error}); install empo2_jax[textworld]") from error


def _start(path: Path, asked: Sequence[str]) -> Any:
    textworld = package()
    with _LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Game .* is not fully supported")  # TextWorld keeps the score itself
        return textworld.start(str(path), textworld.EnvInfos(**dict.fromkeys(asked, True)))


def game_file(task: Task) -> Path:
    """The game of `task`, generated if it is not in the cache yet; raises `EnvError` if that fails."""
    if task.name not in SIZES:
        raise EnvError(f"{task}: the tasks are {', '.join(SIZES)}")
    with _LOCK:
        return _made(task, cache_folder("textworld", metadata.version("textworld")))


def _made(task: Task, place: Path) -> Path:
    textworld, size, path = package(), SIZES[task.name], place / f"{task.name}-{task.variation}.z8"
    if path.is_file():
        return path
    place.mkdir(parents=True, exist_ok=True)
    options = textworld.GameOptions()
    options.seeds, options.nb_rooms, options.nb_objects = task.variation, size.rooms, size.objects
    options.quest_length, options.force_recompile = size.quest_length, True
    with tempfile.TemporaryDirectory(dir=place, prefix="making-") as folder:
        options.path = str(Path(folder) / path.name)
        try:
            made = Path(textworld.generator.compile_game(textworld.generator.make_game(options), options))
        except (textworld.generator.CouldNotGenerateGameError, OSError) as error:
            raise EnvError(f"{task}: TextWorld cannot make the game: {error}") from error
        for part in (made.with_suffix(".json"), made):  # the game comes last: it is what is looked for
            part.replace(path.with_suffix(part.suffix))
    return path


def family(*, tasks: Sequence[str] = (), train: int = 5, dev: int = 20, test: int = 20) -> TextWorldFamily:
    """Games of the sizes `tasks` (default: small), so many seeds per split.

    Raises:
        ConfigError: an unknown size, or more games than a split has.
        EnvError: TextWorld is not installed.
    """
    package()
    sizes, counts = tuple(tasks) or ("small",), {"train": train, "dev": dev, "test": test}
    for size in sizes:
        if size not in SIZES:
            raise ConfigError(f"env.tasks: {NAME} has no task {size!r}; the tasks are {', '.join(SIZES)}")
    for split, count in counts.items():
        if not 1 <= count <= len(SPLITS[split]):
            raise ConfigError(f"{NAME}: {count} {split} variations; 1 to {len(SPLITS[split])} are there")
    return TextWorldFamily(sizes, counts)


def from_config(config: EnvConfig, *, panel: int, workers: int) -> TextWorldFamily:
    """The family that `[env]` describes, with `panel` games per size to evaluate on; `workers` does not matter."""
    return family(tasks=config.tasks, train=config.train_variations, dev=min(panel, 100), test=min(panel, 100))
