"""What is said, or refused, when the numbers of an iteration point at something that cannot work."""

import logging
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from empo2_jax.errors import GUIDE, EnvError, UpdateError
from empo2_jax.types import Episode, Mode

MAX_GAP = {"float32": 1e-4, "bfloat16": 2e-2}  # nats, by compute dtype; in f32 ten times what is asserted in tests
ENTROPY = 0.01, 0.7  # nats per token below which nothing new is tried; share of a uniform guess's that is noise
CANARIES = 10  # a server's gap may be so many times what its canary may
MAX_SKIPPED = 3  # updates in a row
PERIOD = 10  # iterations that are judged together, once each: one alone is too noisy
TIED = 0.9  # share of groups whose returns do not differ; where so many episodes succeed there is nothing left to learn
HARM = 3.0, 0.25  # what memory has to cost: standard errors of the cost, standard deviations of the reward
_log = logging.getLogger(__name__)


def refuse_many_failures(episodes: Sequence[Episode]) -> None:
    """Warn when more than 2 % of the episodes are invalid; raise `EnvError` above 20 %, with the first reason."""
    failed = [episode for episode in episodes if not episode.stop_reason.valid]
    share = len(failed) / max(len(episodes), 1)
    if share > 0.02:
        text = f"{len(failed)} of {len(episodes)} episodes failed ({failed[0].stop_reason}: {failed[0].error})"
        if share > 0.2:
            raise EnvError(f"{text}; at most 20 % may; {GUIDE}failed-episodes")
        _log.warning("%s; %sfailed-episodes", text, GUIDE)


def count_skipped(in_a_row: int, skipped: bool, where: str) -> int:
    """How many updates in a row were skipped, after one more; `where` names it in the warning.

    Raises:
        UpdateError: it was the third: nothing will be learned any more.
    """
    if not skipped:
        return 0
    text = f"{where}: the loss or the gradient is not finite"
    if in_a_row + 1 == MAX_SKIPPED:
        raise UpdateError(
            f"{text}, {MAX_SKIPPED} updates in a row; the weights are unharmed, but this configuration cannot go on: "
            f"a lower learning_rate helps most; {GUIDE}updates-that-are-not-finite"
        )
    _log.warning("%s; the update was skipped; %supdates-that-are-not-finite", text, GUIDE)
    return in_a_row + 1


def warn(metrics: Mapping[str, float], learning_rate: float, max_gap: float, vocabulary: int) -> None:
    """Say when numbers point at a setting that cannot work or at an engine that does not match the trainer.

    Args:
        metrics: Of one iteration.
        learning_rate: Of the optimizer.
        max_gap: Nats that the engine's log-probs may differ from the trainer's.
        vocabulary: Tokens of the policy.
    """
    if metrics["memory/tips_missing"]:
        _log.warning(
            "%d episodes left no tip: they wrote none, or their end did not fit into rollout.max_length; "
            "%smissing-tips",
            metrics["memory/tips_missing"],
            GUIDE,
        )
    if metrics.get("actor/rows_too_long", 0.0) > 0:
        _log.warning(
            "%d rows are longer than the largest of update.buckets: not trained on, while their returns count; "
            "%srows-too-long",
            metrics["actor/rows_too_long"],
            GUIDE,
        )
    if metrics.get("mismatch/logprob_abs_diff_max", 0.0) > max_gap:
        _log.warning(
            "engine and trainer log-probs differ by %.1e nats, more than %.0e; %sengine-and-trainer-disagree",
            metrics["mismatch/logprob_abs_diff_max"],
            max_gap,
            GUIDE,
        )
    entropy, (least, share) = metrics.get("actor/entropy"), ENTROPY
    if entropy is not None and not least <= entropy <= share * math.log(vocabulary):
        _log.warning(
            "the policy's entropy is %.1e nats per token: it %s; allowed are %g to %.1f; %sentropy-out-of-bounds",
            entropy,
            "repeats itself, and its groups end alike" if entropy < least else "guesses",
            least,
            share * math.log(vocabulary),
            GUIDE,
        )
    if metrics["actor/updates"] < 5 and learning_rate <= 2e-6:
        _log.warning(
            "%d updates per iteration at learning rate %g: the weights hardly move; lower update.minibatch_steps; "
            "%sweights-that-hardly-move",
            metrics["actor/updates"],
            learning_rate,
            GUIDE,
        )


def warn_of_trends(newest: Sequence[Mapping[str, Any]]) -> None:
    """Say what shows over `PERIOD` iterations, after each iteration whose number is a multiple of it.

    Args:
        newest: Lines of `metrics.jsonl`, oldest first. Nothing else is remembered: a run that was killed says the same.
    """
    if len(newest) < PERIOD or int(newest[-1]["iteration"]) % PERIOD:
        return
    records = list(newest)[-PERIOD:]
    ends = _finite(records, "group/all_equal", "group/phantom", "episode/success_rate")
    tied = [equal + phantom for equal, phantom, _ in ends]
    if 2 * len(ends) >= PERIOD and fmean(tied) >= TIED > fmean(success for _, _, success in ends):
        _log.warning(
            "%.0f %% of the groups of the last %d iterations ended with equal returns: their episodes have no "
            "advantage, or for novelty alone; %sgroups-that-all-fail",
            100 * fmean(tied),
            PERIOD,
            GUIDE,
        )
    costs = [cost for record in records for cost in _cost_of_memory(record)]
    if 2 * len(costs) < PERIOD:
        return
    cost, spread = (fmean(values) for values in zip(*costs, strict=True))
    error = stdev(points for points, _ in costs) / math.sqrt(len(costs))
    if cost > max(HARM[0] * error, HARM[1] * spread):
        _log.warning(
            "episodes with memory had %.1f points less than those without (standard error %.1f) in the last %d "
            "iterations; %smemory-that-hurts",
            cost,
            error,
            PERIOD,
            GUIDE,
        )


def _cost_of_memory(record: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Points that episodes drawn to act with memory had less than the others, and the deviation of all rewards.

    Nothing where one of the two kinds is missing, as always with `algorithm.mode_scope = "iteration"`: other iterations
    have other tasks and weights, which would pass for the cost of memory. `memory/utility` compares those that saw a
    tip instead, and who stays longer in familiar states sees more of them.
    """
    share, reward = "empo2/{}/share", "empo2/{}/reward"
    modes = [mode.label for mode in (Mode.ON_POLICY_WITH_MEMORY, Mode.OFF_POLICY)]
    told = [pair for mode in modes for pair in _finite([record], share.format(mode), reward.format(mode))]
    bare = _finite([record], reward.format(Mode.ON_POLICY.label), "reward/std")
    total = sum(weight for weight, _ in told)
    return [(points - sum(weight * mean for weight, mean in told) / total, std) for points, std in bare if told]


def _finite(records: Sequence[Mapping[str, Any]], *keys: str) -> list[tuple[float, ...]]:
    """The values of these keys, of the records where all are there and finite; text stands for what is not."""
    rows = [[record.get(key, math.nan) for key in keys] for record in records]
    numbers = [tuple(value for value in row if not isinstance(value, str) and math.isfinite(value)) for row in rows]
    return [row for row in numbers if len(row) == len(keys)]
