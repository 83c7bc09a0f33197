"""The 30 tasks of ScienceWorld as data: three ways to name them, their variations, splits and usual step limits.

The splits are those of the simulator itself (a test compares them): train, dev and test follow each other without a
gap. A step limit of `None` means that no limit is in common use; gold paths of those tasks have 50 to 190 actions.
"""

from difflib import get_close_matches
from typing import NamedTuple

from empo2_jax.errors import ConfigError

SPLITS = ("train", "dev", "test")


class TaskInfo(NamedTuple):
    """One task: id of the package, name, split sizes in variations, step limit, index in alphabetical numbering."""

    id: str
    name: str
    train: int
    dev: int
    test: int
    step_limit: int | None
    index: int

    @property
    def variations(self) -> int:
        """Number of variations, over all splits."""
        return self.train + self.dev + self.test

    def split(self, split: str) -> range:
        """Variation numbers of "train", "dev" or "test"; raises `ConfigError` for another split."""
        if split not in SPLITS:
            raise ConfigError(f"scienceworld: unknown split {split!r}; allowed: {', '.join(SPLITS)}")
        ends = {"train": self.train, "dev": self.train + self.dev, "test": self.variations}
        sizes = {"train": self.train, "dev": self.dev, "test": self.test}
        return range(ends[split] - sizes[split], ends[split])


# fmt: off
TASKS = (
    TaskInfo("1-1", "boil", 14, 7, 9, 100, 0),
    TaskInfo("1-2", "melt", 14, 7, 9, 80, 22),
    TaskInfo("1-3", "freeze", 14, 7, 9, 80, 9),
    TaskInfo("1-4", "change-the-state-of-matter-of", 14, 7, 9, 80, 1),
    TaskInfo("2-1", "use-thermometer", 270, 135, 135, 30, 29),
    TaskInfo("2-2", "measure-melting-point-known-substance", 218, 109, 109, 120, 20),
    TaskInfo("2-3", "measure-melting-point-unknown-substance", 150, 75, 75, None, 21),
    TaskInfo("3-1", "power-component", 10, 5, 5, 30, 25),
    TaskInfo("3-2", "power-component-renewable-vs-nonrenewable-energy", 10, 5, 5, 30, 26),
    TaskInfo("3-3", "test-conductivity", 450, 225, 225, 30, 27),
    TaskInfo("3-4", "test-conductivity-of-unknown-substances", 300, 150, 150, 30, 28),
    TaskInfo("4-1", "find-living-thing", 150, 75, 75, 30, 6),
    TaskInfo("4-2", "find-non-living-thing", 150, 75, 75, 30, 7),
    TaskInfo("4-3", "find-plant", 150, 75, 75, 30, 8),
    TaskInfo("4-4", "find-animal", 150, 75, 75, 30, 5),
    TaskInfo("5-1", "grow-plant", 62, 31, 33, 30, 11),
    TaskInfo("5-2", "grow-fruit", 62, 31, 33, 60, 10),
    TaskInfo("6-1", "chemistry-mix", 16, 8, 8, 60, 2),
    TaskInfo("6-2", "chemistry-mix-paint-secondary-color", 18, 9, 9, 30, 3),
    TaskInfo("6-3", "chemistry-mix-paint-tertiary-color", 18, 9, 9, 30, 4),
    TaskInfo("7-1", "lifespan-longest-lived", 62, 31, 32, 30, 17),
    TaskInfo("7-2", "lifespan-shortest-lived", 62, 31, 32, 30, 19),
    TaskInfo("7-3", "lifespan-longest-lived-then-shortest-lived", 62, 31, 32, 30, 18),
    TaskInfo("8-1", "identify-life-stages-1", 6, 3, 5, 30, 12),
    TaskInfo("8-2", "identify-life-stages-2", 4, 2, 4, 30, 13),
    TaskInfo("9-1", "inclined-plane-determine-angle", 84, 42, 42, None, 14),
    TaskInfo("9-2", "inclined-plane-friction-named-surfaces", 692, 346, 348, None, 15),
    TaskInfo("9-3", "inclined-plane-friction-unnamed-surfaces", 80, 40, 42, None, 16),
    TaskInfo("10-1", "mendelian-genetics-known-plant", 60, 30, 30, None, 23),
    TaskInfo("10-2", "mendelian-genetics-unknown-plant", 240, 120, 120, None, 24),
)
# fmt: on

PAPER_INDICES = (*range(2, 9), 12, 13, *range(17, 21), *range(25, 30))
PAPER_TASKS = tuple(task.name for task in TASKS if task.index in PAPER_INDICES)  # the 18 of its table

_BY_KEY = {key: task for task in TASKS for key in (str(task.index), task.id, task.name)}


def lookup(name: str) -> TaskInfo:
    """The task with this name ("melt"), package id ("1-2") or alphabetical index ("22"); else `ConfigError`."""
    key = name.strip().lower()
    if key not in _BY_KEY:
        near = get_close_matches(key, [task.name for task in TASKS], n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"scienceworld: unknown task {name!r}; did you mean {near!r}? Names, ids (1-1 to 10-2) and 0-29 work"
        )
    return _BY_KEY[key]
