"""Test-time adaptation: trials on the panel's tasks with a memory and fixed weights (paper section 5, OOD adaptation).

After each trial the policy writes tips about its test episodes, and the next trial acts with them. That sees test
rewards, so nothing here is an evaluation: the record carries `LABEL` and goes to a file of its own. The memory is the
caller's, never the one that training goes on with.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from empo2_jax.evaluation import Panel, refuse_total_failure, summarize
from empo2_jax.memory.tips import Scope, TipMemory
from empo2_jax.rollout.collect import Assignment, Collector
from empo2_jax.rollout.reflect import TipWriter
from empo2_jax.types import Episode, Mode, Task

LABEL = "test-time adaptation (sees test rewards)"


@dataclass(frozen=True)
class Trial:
    """One episode per task, or per task and repeat."""

    now: Panel  # of this trial
    best: Panel  # of the best episode of every task (and repeat) so far


def adapt(
    collector: Collector,
    tasks: Sequence[Task],
    memory: TipMemory,
    writer: TipWriter,
    *,
    trials: int,
    temperature: float,
    scope: Scope,
    seed: int,
) -> Generator[Trial, None, None]:
    """Yield trial by trial; `memory` holds the tips of all trials so far.

    Args:
        collector: With the weights to adapt; they stay as they are.
        tasks: One episode of each per trial, with the same draws in every run.
        memory: Where the episodes find tips and where theirs are kept; changed.
        writer: Writes the tips.
        trials: How many.
        temperature: Of the actions' sampling.
        scope: What shares a buffer of the memory.
        seed: Of all draws.

    Raises:
        EnvError: all episodes of a trial failed.
    """
    best: dict[Task, Episode] = {}
    for number in range(1, trials + 1):
        assignments = [
            Assignment(f"adaptation/{task}/t{number}", task, Mode.ON_POLICY_WITH_MEMORY, seed) for task in tasks
        ]
        episodes = collector.collect(assignments, temperature=temperature, memory=memory, writer=writer)
        refuse_total_failure(episodes, f"adaptation, trial {number}")
        valid = [episode for episode in episodes if episode.stop_reason.valid]
        memory.commit(memory.entries(valid, scope, number))
        for episode in valid:
            if episode.task not in best or episode.score > best[episode.task].score:
                best[episode.task] = episode
        yield Trial(summarize(episodes), summarize(list(best.values())))


def record(trials: Sequence[Trial], *, iteration: int, split: str, memory: str) -> dict[str, Any]:
    """The line that goes to adaptations.jsonl: curves over the trials, and every episode by variation.

    A score is the mean of the trial's repeats, None where one failed. `best_*` is the mean over tasks of the best
    episode so far; it never falls while no episode fails (`complete`). A row has, trial by trial, the score, the best
    tip that the first turn of the first repeat showed and the tip that it wrote afterwards ("" for none): whether a
    curve falls by what was written or by how it was read.

    Args:
        trials: All of them, in order.
        iteration: Of the checkpoint.
        split: That the tasks are from.
        memory: What it began with: empty or run.
    """
    rows: dict[tuple[str, int], dict[str, list[Any]]] = {}
    for trial in trials:
        cells: dict[tuple[str, int], list[Episode]] = {}
        for episode in trial.now.episodes:
            cells.setdefault((episode.task.name, episode.task.variation), []).append(episode)
        for cell, episodes in cells.items():
            failed = any(not episode.stop_reason.valid for episode in episodes)
            row = rows.setdefault(cell, {"scores": [], "tips_shown": [], "tips_written": []})
            row["scores"].append(None if failed else fmean(episode.score for episode in episodes))
            row["tips_shown"].append(_shown(episodes[0]))
            row["tips_written"].append(episodes[0].tip)
    return {
        "label": LABEL,
        "iteration": iteration,
        "split": split,
        "memory": memory,
        "score": [trial.now.score for trial in trials],
        "success": [trial.now.success for trial in trials],
        "best_score": [trial.best.score for trial in trials],
        "best_success": [trial.best.success for trial in trials],
        "complete": all(trial.now.complete for trial in trials),
        "rows": [{"task": task, "variation": number, **row} for (task, number), row in rows.items()],
    }


def _shown(episode: Episode) -> str:
    return episode.steps[0].tips[0] if episode.steps and episode.steps[0].tips else ""
