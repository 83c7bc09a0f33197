"""What an algorithm decides: how an episode acts and learns, and the advantage of every step of a valid episode.

The rest of the package is blind to the choice: all algorithms share one collector, one loss and one learner.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

from empo2_jax.config import AlgorithmConfig
from empo2_jax.ops.advantages import group_advantages
from empo2_jax.types import Episode, EpisodeGroup, Mode

StepAdvantages = Float64[np.ndarray, " _"]  # [S] of one episode


@runtime_checkable
class Algorithm(Protocol):
    """A module with these two functions, found by its name."""

    def draw_mode(self, config: AlgorithmConfig, seed: int, iteration: int, group: int, member: int) -> Mode:
        """The mode of one training episode; the same arguments give the same mode."""
        ...

    def advantages(self, groups: Sequence[EpisodeGroup], config: AlgorithmConfig) -> list[StepAdvantages]:
        """One array per episode of `valid_episodes(groups)`, in that order, with one value per step."""
        ...


def valid_episodes(groups: Sequence[EpisodeGroup]) -> list[Episode]:
    """Valid episodes in group and member order; `Row.episode` counts in this list."""
    return [episode for group in groups for episode in group.episodes if episode.stop_reason.valid]


def spent(episodes: Sequence[Episode]) -> dict[str, int]:
    """What episodes cost, by the names of `total/*`: steps, tokens computed and sampled, requests for tips."""
    steps = [step for episode in episodes for step in episode.steps]
    prompts = sum(len(step.prompt_ids) - step.cached_tokens for step in steps)
    return {
        "environment_steps": len(steps),
        "prompt_tokens": prompts + sum(episode.tip_prompt_tokens for episode in episodes),
        "sampled_tokens": sum(len(step.action_ids) for step in steps) + sum(episode.tip_tokens for episode in episodes),
        "tip_calls": sum(bool(episode.tip_tokens) for episode in episodes),
    }


def relative_advantages(
    groups: Sequence[EpisodeGroup], config: AlgorithmConfig, episode_return: Callable[[Episode], float]
) -> list[StepAdvantages]:
    """Group-relative advantages of the valid episodes, in the order of `valid_episodes`; equal over the steps."""
    advantages: list[StepAdvantages] = []
    for group in groups:
        valid = np.array([episode.stop_reason.valid for episode in group.episodes], bool)
        values = group_advantages(
            np.array([episode_return(episode) for episode in group.episodes], np.float64),
            valid,
            np.array([episode.mode for episode in group.episodes], np.int64),
            baseline=config.advantage_baseline,
            normalization=config.advantage_normalization,
            std_floor=config.advantage_std_floor,
        )
        members = valid_episodes([group])
        advantages += [np.full(len(e.steps), value) for e, value in zip(members, values[valid], strict=True)]
    return advantages


def anchor_groups(group: EpisodeGroup) -> list[list[tuple[int, int]]]:
    """Steps of a group that began in the same state, as (place in `valid_episodes([group])`, step), in that order.

    Steps acted with tips or without a known state are in none: another prompt is another situation.
    """
    same: dict[str, list[tuple[int, int]]] = {}
    for place, episode in enumerate(valid_episodes([group])):
        for number, step in enumerate(episode.steps):
            if step.anchor and not step.acted_with_tips:
                same.setdefault(step.anchor, []).append((place, number))
    return list(same.values())


def group_metrics(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """Rewards, scores and the health of groups; means over valid episodes, left out where there are none.

    `reward/*` is the extrinsic return in points, `reward/intrinsic_mean` the novelty part, `novelty/bonus_mean` the
    same per step. Of the groups with at least 2 valid members, `group/all_equal` is the share whose returns do not
    differ (no episode has an advantage; steps may have one in GiGPO), and `group/phantom` the share whose extrinsic
    returns do not differ while novelty does.
    `group/shared_states` is the share of steps (acted without tips) that began in a state in which another step of
    their group began too: the only ones with a step advantage in GiGPO.
    `memory/tip_tokens` is the length of the tips that were written: it falls where they become fragments.
    `memory/utility` is what tips are worth in points: the mean reward of a group's members that saw a tip less that of
    the others, averaged over the groups that have both. Who saw one was not drawn: see `alarms.warn_of_trends`.
    """
    everyone = [episode for group in groups for episode in group.episodes]
    valid = valid_episodes(groups)
    metrics = {"episode/invalid": 1 - len(valid) / len(everyone)} if everyone else {}
    if not valid:
        return metrics
    rewards = np.array([episode.extrinsic_return for episode in valid])
    metrics |= {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/intrinsic_mean": float(np.mean([episode.intrinsic_return for episode in valid])),
        "episode/score": float(np.mean([episode.score for episode in valid])),
        "episode/success_rate": float(np.mean([episode.success for episode in valid])),
        "episode/length": float(np.mean([len(episode.steps) for episode in valid])),
    }
    for mode in Mode:
        members = np.array([episode.mode == mode for episode in valid])
        if members.any():
            metrics[f"empo2/{mode.label}/reward"] = float(rewards[members].mean())
            metrics[f"empo2/{mode.label}/share"] = float(members.mean())
    if written := [episode.tip_tokens for episode in valid if episode.tip_tokens]:
        metrics["memory/tip_tokens"] = float(np.mean(written))
    if bonuses := [step.intrinsic_reward for episode in valid for step in episode.steps]:
        metrics["novelty/bonus_mean"] = float(np.mean(bonuses))
    return metrics | _tied_groups(groups) | _shared_states(groups) | _utility(groups)


def _shared_states(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    sizes = [len(same) for group in groups for same in anchor_groups(group)]
    return {"group/shared_states": sum(size for size in sizes if size > 1) / sum(sizes)} if sizes else {}


def _utility(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    gains = []
    for group in groups:
        members = valid_episodes([group])
        rewards = np.array([episode.extrinsic_return for episode in members])
        saw = np.array([any(step.tips for step in episode.steps) for episode in members], bool)
        if saw.any() and not saw.all():
            gains.append(rewards[saw].mean() - rewards[~saw].mean())
    return {"memory/utility": float(np.mean(gains))} if gains else {}


def _tied_groups(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    equal, phantom = [], []
    for group in groups:
        members = valid_episodes([group])
        if len(members) < 2:
            continue
        tied = len({round(episode.extrinsic_return, 6) for episode in members}) == 1
        same_novelty = len({round(episode.intrinsic_return, 6) for episode in members}) == 1
        equal.append(tied and same_novelty)
        phantom.append(tied and not same_novelty)
    if not equal:
        return {}
    return {"group/all_equal": float(np.mean(equal)), "group/phantom": float(np.mean(phantom))}
