"""Evaluation on a fixed panel: no memory, fixed seeds, the environment's own score.

Variations and repeats are fixed by the configuration or a panel file and the draws by (task, variation, repeat), so
two evaluations of the same weights agree. Means go over repeats, then variations, then tasks. An episode that failed
makes the panel incomplete and is never counted as 0.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from empo2_jax.config import EvaluationConfig
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.envs.problems import panel_tasks
from empo2_jax.errors import EnvError
from empo2_jax.rollout.collect import Assignment, Collector
from empo2_jax.types import Episode


@dataclass(frozen=True)
class Panel:
    """Result of one evaluation."""

    score: float  # points
    success: float  # share, 0–1
    valid_actions: float  # share of actions that the environment accepted, 0–1
    complete: bool
    rows: list[dict[str, Any]]  # per variation: task, variation, scores, success
    episodes: list[Episode]

    def record(self, label: str, iteration: int, split: str) -> dict[str, Any]:
        """The line that goes to evaluations.jsonl."""
        return {
            "label": label,
            "iteration": iteration,
            "split": split,
            "score": self.score,
            "success": self.success,
            "valid_actions": self.valid_actions,
            "complete": self.complete,
            "rows": self.rows,
        }


def evaluate(collector: Collector, family: EnvironmentFamily, config: EvaluationConfig) -> Panel:
    """Run the panel of `config` with the engine's current weights; raises `EnvError` when every episode failed."""
    assignments = [
        Assignment(f"panel/{task}/r{repeat}", task, seed=config.seed)
        for task in panel_tasks(family, config)
        for repeat in range(config.repeats)
    ]
    episodes = collector.collect(assignments, temperature=config.temperature)
    refuse_total_failure(episodes, "evaluation")
    return summarize(episodes)


def refuse_total_failure(episodes: Sequence[Episode], what: str) -> None:
    """Raise `EnvError` when no episode is valid."""
    if not any(episode.stop_reason.valid for episode in episodes):
        raise EnvError(f"{what}: all {len(episodes)} episodes failed: {episodes[0].error}")


def summarize(episodes: Sequence[Episode]) -> Panel:
    """Means over repeats, variations, tasks of the valid episodes."""
    valid = [episode for episode in episodes if episode.stop_reason.valid]
    cells: dict[str, dict[int, list[Episode]]] = defaultdict(lambda: defaultdict(list))
    for episode in valid:
        cells[episode.task.name][episode.task.variation].append(episode)

    def mean(value: Any) -> float:
        per_task = [fmean(fmean(map(value, cell)) for cell in variations.values()) for variations in cells.values()]
        return fmean(per_task) if per_task else float("nan")

    rows = [
        {
            "task": name,
            "variation": variation,
            "scores": [episode.score for episode in cell],
            "success": fmean(float(episode.success) for episode in cell),
        }
        for name, variations in cells.items()
        for variation, cell in sorted(variations.items())
    ]
    steps = [step.valid for episode in valid for step in episode.steps]
    return Panel(
        score=mean(lambda episode: episode.score),
        success=mean(lambda episode: float(episode.success)),
        valid_actions=fmean(map(float, steps)) if steps else 0.0,
        complete=len(valid) == len(episodes),
        rows=rows,
        episodes=list(episodes),
    )
