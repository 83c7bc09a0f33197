"""GRPO: group-relative advantages on the environment's return, every episode without tips.

No memory, no novelty, no value function; the reference point that `empo2` extends.
"""

from collections.abc import Sequence

from empo2_jax.algorithms.base import relative_advantages
from empo2_jax.config import AlgorithmConfig
from empo2_jax.types import EpisodeGroup, Mode


def draw_mode(config: AlgorithmConfig, seed: int, iteration: int, group: int, member: int) -> Mode:
    """Always on-policy."""
    return Mode.ON_POLICY


def advantages(groups: Sequence[EpisodeGroup], config: AlgorithmConfig) -> list[float]:
    """A = (R − mean) / (std + eps) within each group, R extrinsic."""
    return relative_advantages(groups, config, lambda episode: episode.extrinsic_return)
