"""GRPO (arXiv 2402.03300, section 4.1): advantages against the group on the environment's return, nothing else.

Against PPO: the mean of the group is the baseline, there is no value function. No memory, no novelty; the reference
point that `empo2` and `gigpo` extend.
"""

from collections.abc import Sequence

from empo2_jax.algorithms.base import StepAdvantages, relative_advantages
from empo2_jax.config import AlgorithmConfig
from empo2_jax.types import EpisodeGroup, Mode


def draw_mode(config: AlgorithmConfig, seed: int, iteration: int, group: int, member: int) -> Mode:
    """Always on-policy."""
    return Mode.ON_POLICY


def advantages(groups: Sequence[EpisodeGroup], config: AlgorithmConfig) -> list[StepAdvantages]:
    """A = (R − mean) / (std + eps) within each group, R extrinsic."""
    return relative_advantages(groups, config, lambda episode: episode.extrinsic_return)
