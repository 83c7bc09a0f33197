"""Which problems an evaluation plays: those of a panel file, or the first variations of a split.

Repeats, temperature and seed are the evaluation's own; here a problem is only found, or said not to exist.
"""

from collections import defaultdict
from pathlib import Path

from empo2_jax.config import EvaluationConfig
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.errors import ConfigError
from empo2_jax.panels import load_panel
from empo2_jax.types import Task


def panel_tasks(family: EnvironmentFamily, config: EvaluationConfig) -> list[Task]:
    """The problems of the panel file, else the first `config.variations` variations of every task of the split.

    Raises:
        ConfigError: the panel is of another environment or names a problem that does not exist.
    """
    if config.panel:
        panel = load_panel(Path(config.panel))
        if panel.env != family.name:
            raise ConfigError(f"{config.panel}: a panel of {panel.env}, but the environment is {family.name}")
        return [family.task(name, number) for name, numbers in panel.tasks.items() for number in numbers]
    return [task for tasks in _first(family, config).values() for task in tasks]


def shortfall(family: EnvironmentFamily, config: EvaluationConfig) -> str:
    """A line about tasks with fewer variations than `config.variations`; "" where all have as many."""
    if config.panel:
        return ""
    few = [f"{name} ({len(tasks)})" for name, tasks in _first(family, config).items() if len(tasks) < config.variations]
    if not few:
        return ""
    names = ", ".join(few[:3]) + (f" and {len(few) - 3} more" if len(few) > 3 else "")
    return f"evaluation.variations = {config.variations}: fewer in the {config.split} split of {names}"


def _first(family: EnvironmentFamily, config: EvaluationConfig) -> dict[str, list[Task]]:
    first: dict[str, list[Task]] = defaultdict(list)
    for task in family.tasks(config.split):
        if len(first[task.name]) < config.variations:
            first[task.name].append(task)
    return first
