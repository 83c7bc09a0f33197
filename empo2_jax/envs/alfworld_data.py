"""ALFWorld's text games on the disk: which there are, by split and kind of task, and one of them read and checked.

The data is not ours to ship: `alfworld-download` of the package alfworld gets it. A game is
`<split>/<kind>-<object>-<movable>-<receptacle>-<scene>/<trial>/game.tw-pddl`, one JSON with a PDDL domain, a PDDL
problem and a grammar for all texts. TextWorld evaluates expressions of the grammar as Python: games from strangers are
programs.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from empo2_jax.errors import ConfigError, DataError

KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
FOLDERS = {"train": "train", "dev": "valid_seen", "test": "valid_unseen"}
FIRST = {"train": 0, "dev": 10_000, "test": 20_000}  # number of a split's first game of a kind
# Games of the published set that can be solved, in the order of `KINDS` (Shridhar et al., 2021): 3,553, 140 and 134.
PUBLISHED = {
    "train": (790, 308, 650, 459, 533, 813),
    "dev": (35, 13, 27, 16, 25, 24),
    "test": (24, 18, 31, 23, 21, 17),
}
_TEXTS = ("pddl_domain", "grammar", "pddl_problem")


class GameData(NamedTuple):
    """A game file that can be played."""

    texts: Mapping[str, str]  # what the engine takes
    solvable: bool  # as the file says
    walkthrough: Sequence[str]  # empty where the file has none


class Games:
    """Game files of a data folder; a game's number is its place among those of its split and kind, sorted by path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._paths = {split: _by_kind(root / folder) for split, folder in FOLDERS.items()}

    def numbers(self, split: str, kind: str) -> range:
        """Those of a split's games of a kind."""
        return range(FIRST[split], FIRST[split] + len(self._paths[split][kind]))

    def path(self, kind: str, number: int) -> Path:
        """The file of a game; raises `ConfigError` that says which numbers there are."""
        for split in FOLDERS:
            if number in (numbers := self.numbers(split, kind)):
                return self._paths[split][kind][number - numbers.start]
        there = ", ".join(f"{FIRST[split]} to {self.numbers(split, kind).stop - 1}" for split in FOLDERS)
        raise ConfigError(f"alfworld/{kind}/{number}: no such game in {self.root}; there are {there}")

    def first(self, split: str, kind: str, count: int) -> list[int]:
        """Numbers of the first `count` games that can be solved; raises `DataError` for a file that cannot be read."""
        found: list[int] = []
        for number in self.numbers(split, kind):
            if len(found) == count:
                break
            if read_game(self.path(kind, number)).solvable:
                found.append(number)
        return found


def find_data(data: str) -> Path:
    """The folder that holds the three splits; "" is `$ALFWORLD_DATA`, else where `alfworld-download` puts them.

    Raises:
        ConfigError: a split is missing or has no games.
    """
    given = Path(data or os.environ.get("ALFWORLD_DATA") or Path.home() / ".cache" / "alfworld")
    root = given / "json_2.1.1" if (given / "json_2.1.1").is_dir() else given
    missing = [folder for folder in FOLDERS.values() if not any((root / folder).glob("*/*/game.tw-pddl"))]
    if missing:
        raise ConfigError(
            f"env.data = {data!r}: {root} has no games (*/*/game.tw-pddl) in {', '.join(missing)}; get them with "
            "alfworld-download (package alfworld) and name the folder in env.data or $ALFWORLD_DATA"
        )
    return root


def read_game(path: Path) -> GameData:
    """A game file, checked; raises `DataError`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a game: {error}") from error
    if not isinstance(data, dict):
        raise DataError(f"{path}: not a game: an object with {', '.join(_TEXTS)} is expected")
    for key in _TEXTS:
        if not isinstance(data.get(key), str):
            raise DataError(f"{path}: {key} must be text, found {type(data.get(key)).__name__}")
    walkthrough = data.get("walkthrough") or []
    if not isinstance(walkthrough, list) or not all(isinstance(action, str) for action in walkthrough):
        raise DataError(f"{path}: walkthrough must be a list of actions")
    return GameData({key: data[key] for key in _TEXTS}, data.get("solvable") is True, walkthrough)


def counted(games: Games) -> list[str]:
    """A line per split: how many games can be solved, how many the published set has, what cannot be read."""
    return [_count(games, split) for split in FOLDERS]


def _count(games: Games, split: str) -> str:
    solvable, unsolvable, broken = 0, 0, []
    for kind in KINDS:
        for number in games.numbers(split, kind):
            try:
                good = read_game(games.path(kind, number)).solvable
            except DataError as error:
                broken.append(str(error))
            else:
                solvable, unsolvable = solvable + good, unsolvable + (not good)
    published = sum(PUBLISHED[split])
    line = f"{FOLDERS[split]}: {solvable:,} games can be solved (the published set has {published:,})"
    line += f", {unsolvable:,} are said not to be" if unsolvable else ""
    return line + (f", {len(broken):,} cannot be read, the first: {broken[0]}" if broken else "")


def _by_kind(folder: Path) -> dict[str, list[Path]]:
    paths = sorted(folder.glob("*/*/game.tw-pddl"))
    by_kind: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for path in paths:
        problem = path.parent.parent.name
        kind = problem.partition("-")[0]
        if kind in by_kind and "Sliced" not in problem:  # as published: nothing is sliced, and no movable receptacles
            by_kind[kind].append(path)
    return by_kind
