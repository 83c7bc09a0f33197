"""GiGPO (arXiv 2505.10978, section 4). Against GRPO: a second advantage, of the step among its like.

A_t = A_episode + w · A_step,t. Steps of a task group that began in the same state form a step group; what is compared
in it is the discounted return from there on, G_t = Σ_{k ≥ t} γ^(k − t) · r_k. A state that only one step began in has
nothing to compare: 0. Mean and deviation are those of GRPO in both terms, floor and normalization included. With w = 0
this is GRPO. States are the same if their texts are, without a similarity.
"""

from collections.abc import Sequence

import numpy as np

from empo2_jax.algorithms import grpo
from empo2_jax.algorithms.base import StepAdvantages, anchor_groups, valid_episodes
from empo2_jax.config import AlgorithmConfig
from empo2_jax.ops.advantages import discounted_returns, group_advantages
from empo2_jax.types import EpisodeGroup

draw_mode = grpo.draw_mode


def advantages(groups: Sequence[EpisodeGroup], config: AlgorithmConfig) -> list[StepAdvantages]:
    """A_episode + w · A_step, R and r extrinsic."""
    by_step = [values for group in groups for values in step_advantages(group, config)]
    by_episode = grpo.advantages(groups, config)
    return [whole + config.step_weight * part for whole, part in zip(by_episode, by_step, strict=True)]


def step_advantages(group: EpisodeGroup, config: AlgorithmConfig) -> list[StepAdvantages]:
    """A_step of the valid episodes; steps acted with tips have 0 and are compared with none."""
    rewards = [np.array([step.reward for step in episode.steps], np.float64) for episode in valid_episodes([group])]
    returns = [discounted_returns(values, config.step_discount) for values in rewards]
    found = [np.zeros_like(values) for values in rewards]
    for same in anchor_groups(group):
        values = group_advantages(
            np.array([returns[episode][step] for episode, step in same]),
            np.ones(len(same), bool),
            np.zeros(len(same), np.int64),
            normalization=config.advantage_normalization,
            std_floor=config.advantage_std_floor,
        )
        for (episode, step), value in zip(same, values, strict=True):
            found[episode][step] = value
    return found
