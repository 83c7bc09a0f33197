"""Retrospex (arXiv 2505.11807, section 3): an offline critic rescores what an imitating policy proposes.

Against `imitation`, whose policy it acts with: recorded failures count too, in a critic apart from the policy, trained
by implicit Q-learning (arXiv 2110.06169, equations 5 and 6: `ops/iql.py`). At step t the action of the highest
λ·p + (1 − λ)·q is taken, with λ = max(limit, d^t), p the policy's likelihood and q the critic's value, both min-max
normalized over the proposals. As in the paper's comparison, ScienceWorld's hand-made rules for "focus on" and
"teleport" are left out. No weight of the policy changes after imitation. The networks are in `learner/critic.py`, the
sampling in `rollout/rescore.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32

from empo2_jax.algorithms.imitation import Trajectory
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.types import Proposals, Transitions

Embed = Callable[[Sequence[str]], Float32[np.ndarray, "K D"]]
Values = Callable[[Float32[np.ndarray, "N D"], Float32[np.ndarray, "N D"]], Float32[np.ndarray, " N"]]


def transitions(trajectories: Sequence[Trajectory], family: EnvironmentFamily, embed: Embed) -> Transitions:
    """All steps of the recordings; rewards in shares of the full score. The last step of each is an end."""
    turns = [(item.goal, turn) for item in trajectories for turn in item.turns]
    states = embed([family.memory_key(goal, turn.state) for goal, turn in turns])
    ends = np.cumsum([len(item.turns) for item in trajectories]) - 1
    following = np.arange(1, len(turns) + 1)
    following[ends] = ends  # of no effect
    ended = np.zeros(len(turns), bool)
    ended[ends] = True
    rewards = np.array([turn.reward for _, turn in turns], np.float32) / np.float32(family.max_score)
    return Transitions(
        states, embed([bare_action(turn.action) for _, turn in turns]), rewards, states[following], ended
    )


def bare_action(answer: str) -> str:
    """The last line of an answer: the action without the thoughts before it."""
    return next((line for line in reversed(answer.split("\n")) if line.strip()), "").strip()


def policy_share(step: int, decay: float, limit: float) -> float:
    """λ = max(limit, d^t): the longer an episode, the more the critic is heard."""
    return max(limit, decay**step)


def scores(
    likelihoods: Float[np.ndarray, " K"], values: Float[np.ndarray, " K"], share: float
) -> Float[np.ndarray, " K"]:
    """λ·p + (1 − λ)·q, both min-max normalized; where all are equal, 0."""
    return share * _normalized(likelihoods) + (1 - share) * _normalized(values)


def _normalized(values: Float[np.ndarray, " K"]) -> Float[np.ndarray, " K"]:
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


@dataclass(frozen=True)
class Rescorer:
    """Chooses among proposals; implements `rollout.rescore.Chooser`."""

    family: EnvironmentFamily
    embed: Embed
    values: Values
    decay: float
    limit: float

    def choose(self, asked: Sequence[Proposals]) -> list[int]:
        """The place of the best proposal of each; the first of equal ones."""
        states = [self.family.memory_key(item.goal, item.state) for item in asked for _ in item.answers]
        actions = [bare_action(answer) for item in asked for answer in item.answers]
        values = np.split(
            self.values(self.embed(states), self.embed(actions)), np.cumsum([len(item.answers) for item in asked])[:-1]
        )
        return [
            int(np.argmax(scores(item.likelihoods, value, policy_share(item.step, self.decay, self.limit))))
            for item, value in zip(asked, values, strict=True)
        ]
