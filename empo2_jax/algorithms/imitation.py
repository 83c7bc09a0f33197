"""Imitation: what happened before, as transcripts to learn by heart (the first half of Retrospex, arXiv 2505.11807).

Against `grpo`: nothing is sampled and no return is compared; the loss is the negative log-likelihood of recorded
answers, −Σ log π(a | s, u), recorded ones under the prompt without tips. Here is what is imitated: recordings of any
run directory, the environment's own solutions and demonstrations; with the filters, and what is held out. The loss is
in `learner/step.py`, the loop in `warmstart.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from empo2_jax.config_offline import DEMONSTRATIONS, GOLD, WarmstartConfig
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.metrics import EPISODES_FOLDER, read_jsonl
from empo2_jax.prompts import without_tips
from empo2_jax.randomness import generator
from empo2_jax.types import Message, StopReason, Task

Transcripts = Sequence[Sequence[Message]]


@dataclass(frozen=True)
class Turn:
    """One step of a recording."""

    observation: str  # shown before the action
    state: str  # identifies the state before the action; the observation where that was not recorded
    action: str  # the answer as it was given
    reward: float  # points


@dataclass(frozen=True)
class Trajectory:
    """One recorded episode."""

    task: Task
    goal: str
    turns: tuple[Turn, ...]
    score: float  # points
    success: bool


def recorded(run_dir: Path, env: str) -> list[Trajectory]:
    """Valid episodes with at least one step in `episodes/` of a run, by iteration.

    Raises:
        DataError: no episodes there, or a file that is no record of episodes.
        ConfigError: they are of another environment than `env`.
    """
    files = sorted((run_dir / EPISODES_FOLDER).glob("*.jsonl"), key=lambda path: (len(path.name), path.name))
    if not files:
        raise DataError(f"{run_dir}: no recorded episodes ({EPISODES_FOLDER}/*.jsonl); see run.episodes_logged")
    found = []
    for file in files:
        for number, record in enumerate(read_jsonl(file), 1):
            try:
                valid, trajectory = StopReason(record["stop_reason"]).valid, _trajectory(record)
            except (KeyError, ValueError, TypeError) as error:
                raise DataError(f"{file}: line {number} is no episode: {error!r}") from None
            if trajectory.task.env != env:
                raise ConfigError(f"{file}: episodes of {trajectory.task.env}, but the environment is {env}")
            if valid and trajectory.turns:
                found.append(trajectory)
    return found


def _trajectory(record: dict[str, Any]) -> Trajectory:
    env, _, rest = record["task"].partition("/")
    name, _, variation = rest.rpartition("/")
    turns = tuple(
        Turn(step["observation"], step.get("state_before") or step["observation"], step["action"], step["reward"])
        for step in record["steps"]
    )
    task = Task(env, name, int(variation))
    return Trajectory(task, record["goal"], turns, float(record["score"]), bool(record["success"]))


def solved(family: EnvironmentFamily, tasks: Sequence[Task], count: int) -> list[Trajectory]:
    """The known solutions of the first `count` of `tasks` that have one, played in the world to their end."""
    paths = ((task, path) for task in tasks if (path := family.solution(task)))
    return [_played(family, task, path) for task, path in islice(paths, count)]


def _played(family: EnvironmentFamily, task: Task, actions: Sequence[str]) -> Trajectory:
    """An episode of these actions, without those that the world refused."""
    environment = family.make()
    try:
        before = after = environment.reset(task, 0)
        turns = []
        for action in actions:
            after = environment.step(action)
            if after.resolution != "invalid":
                turns.append(Turn(before.text, before.state, action, after.reward))
                before = after
            if after.done:
                break
        return Trajectory(task, environment.goal, tuple(turns), after.score, after.success)
    finally:
        environment.close()


def select(
    trajectories: Iterable[Trajectory], *, min_score: float, max_steps: int, only_success: bool
) -> list[Trajectory]:
    """Those with at least `min_score` points, at most `max_steps` actions (0: any number), successful if asked."""
    return [
        item
        for item in trajectories
        if item.score >= min_score
        and (not max_steps or len(item.turns) <= max_steps)
        and (item.success or not only_success)
    ]


def transcript(family: EnvironmentFamily, trajectory: Trajectory) -> list[Message]:
    """The chat of a recording, as it would have been without tips."""
    chat = []
    for number, turn in enumerate(trajectory.turns):
        opening = family.first_turn(trajectory.goal, turn.observation)
        chat.append(Message("user", family.next_turn(turn.observation) if number else opening))
        chat.append(Message("assistant", turn.action))
    return chat


def transcripts(family: EnvironmentFamily, config: WarmstartConfig, seed: int) -> list[list[Message]]:
    """What `warmstart.source` names, in its order, as far as the filters let it through.

    Raises:
        ConfigError: a source has nothing, or all of it was filtered out.
        DataError: a run without readable episodes.
    """
    limits = {"min_score": config.min_score, "max_steps": config.max_steps, "only_success": config.only_success}
    chats: list[list[Message]] = []
    for source in config.source:
        if source == DEMONSTRATIONS:
            found = _demonstrations(family, config, seed)
        else:
            is_gold = source == GOLD
            tasks = family.tasks("train") if is_gold else []
            past = solved(family, tasks, config.demonstrations) if is_gold else recorded(Path(source), family.name)
            found = [transcript(family, item) for item in select(past, **limits)]
            if past and not found:
                told = ", ".join(f"{name} = {value}" for name, value in limits.items())
                raise ConfigError(f"warmstart.source {source}: none of {len(past)} episodes passes {told}")
        if not found:
            raise ConfigError(f"warmstart.updates > 0: environment {family.name} offers no {source}")
        chats += found
    return chats


def _demonstrations(family: EnvironmentFamily, config: WarmstartConfig, seed: int) -> list[list[Message]]:
    if not config.kinds:
        return family.demonstrations("train", config.demonstrations, seed)
    if unknown := set(config.kinds) - set(family.demonstration_kinds):
        known = ", ".join(family.demonstration_kinds) or "none to choose from"
        raise ConfigError(f"warmstart.kinds: {family.name} has no {min(unknown)!r}; its kinds are {known}")
    return family.demonstrations("train", config.demonstrations, seed, config.kinds)


def hold_out(chats: Sequence[Sequence[Message]], share: float, seed: int) -> tuple[Transcripts, Transcripts]:
    """Transcripts to learn from, and those of a share of the problems (first turns) that only measure the loss.

    A problem is the same with tips and without.

    Raises:
        ConfigError: fewer than two problems.
    """
    if not share:
        return chats, []
    problem_of = [without_tips(chat[0].content) for chat in chats]
    problems = list(dict.fromkeys(problem_of))
    if len(problems) < 2:
        raise ConfigError(f"warmstart.held_out = {share}: one problem alone; at least two are needed")
    count = min(max(1, round(share * len(problems))), len(problems) - 1)
    apart = {problems[index] for index in generator(seed, "held-out").permutation(len(problems))[:count]}
    learned = [chat for chat, problem in zip(chats, problem_of, strict=True) if problem not in apart]
    return learned, [chat for chat, problem in zip(chats, problem_of, strict=True) if problem in apart]
