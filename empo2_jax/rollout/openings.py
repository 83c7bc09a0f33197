"""Whether the first turn of every task leaves room for an answer, before a run begins.

A prompt that does not fit is an error that names the numbers; it is never cut.
"""

from collections.abc import Sequence

from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.errors import ConfigError
from empo2_jax.rollout.chat import Chat
from empo2_jax.types import Task


def check_openings(
    family: EnvironmentFamily, chat: Chat, tasks: Sequence[Task], *, max_length: int, max_action_tokens: int
) -> None:
    """Render the opening of the first variation of every task.

    Raises:
        ConfigError: one with its answer is longer than `max_length` tokens.
        EnvError: the environment cannot begin an episode.
    """
    environment = family.make()
    try:
        for task in {task.name: task for task in reversed(tasks)}.values():
            observation = environment.reset(task, 0)
            length = len(chat.opening(family.first_turn(environment.goal, observation.text)))
            if length + max_action_tokens > max_length:
                raise ConfigError(
                    f"the first turn of {task} has {length} tokens; with an answer of rollout.max_action_tokens = "
                    f"{max_action_tokens} it exceeds rollout.max_length = {max_length}: fewer env.examples or a larger "
                    "rollout.max_length is needed"
                )
    finally:
        environment.close()
