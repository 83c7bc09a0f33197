"""The experience of one iteration: draw tasks and modes, collect episodes, pay novelty, commit tips and visits.

It depends on the weights that the engine serves and on what earlier iterations committed, never on an update: that is
why it may be made while the update of an earlier iteration runs (`rollout/ahead`). What is learned from it is not here.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from empo2_jax.alarms import refuse_many_failures
from empo2_jax.algorithms.base import Algorithm, valid_episodes
from empo2_jax.config import Config
from empo2_jax.errors import ConfigError, Empo2Error
from empo2_jax.interrupts import Stopped
from empo2_jax.memory.base import Novelty
from empo2_jax.memory.novelty import novelty_key
from empo2_jax.memory.tips import TipMemory
from empo2_jax.metrics import Stopwatch
from empo2_jax.randomness import generator
from empo2_jax.rollout.ahead import Rollout
from empo2_jax.rollout.collect import Assignment, Collector
from empo2_jax.rollout.journal import Journals
from empo2_jax.rollout.reflect import TipWriter
from empo2_jax.types import Episode, EpisodeGroup, Task


class Experience:
    """Makes the rollouts of a run; it owns the tip memory and the novelty store while one is made."""

    def __init__(
        self,
        config: Config,
        tasks: Sequence[Task],
        algorithm: Algorithm,
        collector: Collector,
        memory: TipMemory,
        novelty: Novelty,
        writer: TipWriter | None,
        journals: Journals | None = None,
    ) -> None:
        """`tasks` are those of the train split; without a `writer` no tips are written, without `journals` nothing of
        a rollout that is cut off is kept.
        """
        self._config, self._tasks, self._algorithm = config, tasks, algorithm
        self._collector, self._memory, self._novelty, self._writer = collector, memory, novelty, writer
        self._journals = journals

    def make(self, iteration: int) -> Rollout:
        """The rollout of an iteration.

        Raises:
            EnvError: too many episodes failed; nothing is changed then.
            DataError: episodes that ended cannot be kept; nothing is changed then.
            Stopped: the run is to end; nothing is changed then.
        """
        clock, before = Stopwatch(), dict(self._collector.seconds)
        groups = self.collect(iteration)
        clock.lap("rollout")
        groups, visits = self.reward_novelty(groups)
        clock.lap("novelty")
        self.commit(valid_episodes(groups), visits, iteration)
        clock.lap("memory")
        spent = {name: seconds - before[name] for name, seconds in self._collector.seconds.items()}
        clock.seconds |= {"retrieval_in_rollout": spent["retrieval"], "memory_in_rollout": sum(spent.values())}
        metrics = {f"memory/{name}": float(value) for name, value in self._memory.metrics().items()}
        metrics |= {f"novelty/{name}": float(value) for name, value in self._novelty.metrics().items()}
        return Rollout(iteration, tuple(groups), metrics, clock.seconds)

    def collect(self, iteration: int) -> list[EpisodeGroup]:
        """Draw tasks and modes, run the groups; raises as `make`."""
        config, seed = self._config, self._config.run.seed
        tasks = draw_tasks(self._tasks, config.rollout.tasks_per_iteration, seed, iteration)
        size = config.rollout.group_size
        assignments = [
            Assignment(
                f"i{iteration}/g{group}/e{member}",
                task,
                self._algorithm.draw_mode(config.algorithm, seed, iteration, group, member),
            )
            for group, task in enumerate(tasks)
            for member in range(size)
        ]
        before = self._memory.retrievals
        how = {"temperature": config.rollout.temperature, "memory": self._memory, "writer": self._writer}
        journals, collector = self._journals, self._collector
        opened = journals.open(iteration, collector.policy_version) if journals else nullcontext()
        try:
            with opened as keeper:
                episodes = collector.collect(assignments, keeper=keeper, **how)
            refuse_many_failures(episodes)
        except (Empo2Error, Stopped):
            self._memory.retrievals = before  # what is saved now, and the run, go on as if this had not begun
            raise
        return [
            EpisodeGroup(task, tuple(episodes[group * size : (group + 1) * size])) for group, task in enumerate(tasks)
        ]

    def reward_novelty(self, groups: Sequence[EpisodeGroup]) -> tuple[list[EpisodeGroup], list[Any]]:
        """Groups whose valid episodes carry intrinsic rewards, and the visits to commit."""
        if self._config.intrinsic.kind == "none" or self._config.intrinsic.coefficient == 0:
            return list(groups), []
        pending: list[Any] = []

        def reward(episode: Episode) -> Episode:
            if not episode.stop_reason.valid or not episode.steps:
                return episode
            vectors = self._memory.embed([step.state for step in episode.steps])
            rewards, visits = self._novelty.episode_rewards(novelty_key(episode.task), vectors)
            pending.append(visits)
            steps = zip(episode.steps, rewards.tolist(), strict=True)
            return replace(episode, steps=tuple(replace(step, intrinsic_reward=value) for step, value in steps))

        return [replace(group, episodes=tuple(map(reward, group.episodes))) for group in groups], pending

    def commit(self, episodes: Sequence[Episode], visits: Sequence[Any], iteration: int) -> None:
        """Make the tips and visits of the valid episodes visible to later iterations, in episode order."""
        self._memory.commit(self._memory.entries(episodes, self._config.memory.scope, iteration))
        self._novelty.commit(visits)


def draw_tasks(tasks: Sequence[Task], count: int, seed: int, iteration: int) -> list[Task]:
    """`count` tasks of one iteration: without repeats as far as there are tasks, then again from a new shuffle."""
    if not tasks:
        raise ConfigError("env.tasks: the train split has no task")
    drawn: list[Task] = []
    while len(drawn) < count:
        order = generator(seed, "tasks", iteration, len(drawn)).permutation(len(tasks))
        drawn += [tasks[index] for index in order[: count - len(drawn)]]
    return drawn
