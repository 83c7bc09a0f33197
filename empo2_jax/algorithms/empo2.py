"""EMPO² (paper sections 4.1 to 4.3). Against GRPO: some episodes act with tips, and novelty is part of the return.

An episode acts with tips with probability p; given tips, it is learned as if there had been none with probability q.
With p = 0 and no novelty this is GRPO. The loss of all modes, equations 1 and 2, is in `ops/losses.py`.
"""

from collections.abc import Sequence

from empo2_jax.algorithms.base import StepAdvantages, relative_advantages
from empo2_jax.config import AlgorithmConfig
from empo2_jax.randomness import uniform
from empo2_jax.types import EpisodeGroup, Mode


def draw_mode(config: AlgorithmConfig, seed: int, iteration: int, group: int, member: int) -> Mode:
    """Draw p for acting with tips, then q for learning without them; one draw covers `mode_scope`."""
    scope = {"iteration": (), "group": (group,), "episode": (group, member)}[config.mode_scope]
    if uniform(seed, "p_memory", iteration, *scope) >= config.p_memory:
        return Mode.ON_POLICY
    if uniform(seed, "q_off_policy", iteration, *scope) >= config.q_off_policy:
        return Mode.ON_POLICY_WITH_MEMORY
    return Mode.OFF_POLICY


def advantages(groups: Sequence[EpisodeGroup], config: AlgorithmConfig) -> list[StepAdvantages]:
    """A = (R − mean) / (std + eps) within each group, R = extrinsic + intrinsic."""
    return relative_advantages(groups, config, lambda episode: episode.extrinsic_return + episode.intrinsic_return)
