"""Episodes to rows: which prompt the loss sees, which tokens it counts, and with what weight (paper section 4.2).

A row is one token sequence. It continues while the next prompt starts with everything so far; otherwise a new row
begins, so that an append-only prompt gives one row per episode and a rebuilt one gives a row per step. Rows are built
from the ids of the episode; nothing is tokenized, cut or re-rendered here.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float32, Float64, Int, Int32

from empo2_jax.types import Episode, Mode, Row

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "episode-mean"]


def build_rows(
    episodes: Sequence[Episode],
    advantages: Sequence[float | Float64[np.ndarray, " _"]],
    *,
    min_token_prob: float = 0.0,
    mask_modes: Literal["off_policy", "all"] = "off_policy",
) -> list[Row]:
    """Rows under P_loss: the prompt without tips, except in `ON_POLICY_WITH_MEMORY`.

    Args:
        episodes: The valid episodes of an iteration; `Row.episode` is the index in this list.
        advantages: Of each episode, one value per step, or one for all; the action tokens of a step share it.
        min_token_prob: δ, the threshold of the probability mask; 0 = off.
        mask_modes: Rows the threshold applies to.

    Returns:
        Rows in episode and step order, with `token_weight` 0 until `token_weights` sets it.
    """
    rows = []
    for index, (episode, advantage) in enumerate(zip(episodes, advantages, strict=True)):
        tips = episode.mode == Mode.ON_POLICY_WITH_MEMORY
        prompts = [step.prompt_ids if tips else step.bare_prompt_ids for step in episode.steps]
        masked = mask_modes == "all" or episode.mode == Mode.OFF_POLICY
        by_step = np.broadcast_to(advantage, len(episode.steps))
        rows += _episode_rows(episode, index, prompts, by_step, min_token_prob if masked else 0.0)
    return rows


def acting_rows(episodes: Sequence[Episode]) -> list[Row]:
    """Rows of the `OFF_POLICY` episodes under P_act, the prompt with tips; for forward passes, never for the loss.

    In the other modes P_act is P_loss. Move what is computed on them with `transfer`.
    """
    rows = []
    for index, episode in enumerate(episodes):
        if episode.mode == Mode.OFF_POLICY:
            nothing = np.zeros(len(episode.steps))
            rows += _episode_rows(episode, index, [step.prompt_ids for step in episode.steps], nothing, 0.0)
    return rows


def _episode_rows(
    episode: Episode,
    index: int,
    prompts: Sequence[Int32[np.ndarray, " _"]],
    advantages: Float64[np.ndarray, " S"],
    threshold: float,
) -> list[Row]:
    rows: list[Row] = []
    tokens: list[int] = []
    steps: list[int] = []
    behavior: list[float] = []
    for number, (step, prompt) in enumerate(zip(episode.steps, prompts, strict=True)):
        ids = prompt.tolist()
        if tokens and ids[: len(tokens)] != tokens:
            rows.append(_row(tokens, steps, behavior, episode.mode, index, advantages, threshold))
            tokens, steps, behavior = [], [], []
        fresh, action = len(ids) - len(tokens), step.action_ids.tolist()
        tokens = ids + action
        steps += [-1] * fresh + [number] * len(action)
        behavior += [0.0] * fresh + step.behavior_logprobs.tolist()
    if tokens:
        rows.append(_row(tokens, steps, behavior, episode.mode, index, advantages, threshold))
    return rows


def _row(
    tokens: list[int],
    steps: list[int],
    behavior: list[float],
    mode: Mode,
    episode: int,
    by_step: Float64[np.ndarray, " S"],
    threshold: float,
) -> Row:
    step_index = np.asarray(steps, np.int32)
    mask = step_index >= 0
    return Row(
        token_ids=np.asarray(tokens, np.int32),
        loss_mask=mask,
        step_index=step_index,
        behavior_logprobs=np.asarray(behavior, np.float32),
        advantages=np.where(mask, by_step[step_index], 0.0).astype(np.float32),
        token_weight=np.zeros(len(tokens), np.float32),
        mode=mode,
        episode=episode,
        mask_threshold=threshold,
    )


def transfer(
    source_rows: Sequence[Row],
    source_values: Sequence[Float32[np.ndarray, " _"]],
    target_rows: Sequence[Row],
    target_values: Sequence[Float32[np.ndarray, " _"]],
) -> list[Float32[np.ndarray, " _"]]:
    """Copy values of action tokens to the same episode, step and offset in other rows.

    Args:
        source_rows: Rows under one prompt, for example `acting_rows`.
        source_values: One value per token of each source row.
        target_rows: Rows under another prompt.
        target_values: What the result holds where no source row has the step, and off the action tokens.

    Returns:
        One array per target row.
    """
    by_step = {
        (row.episode, int(step)): values[row.step_index == step]
        for row, values in zip(source_rows, source_values, strict=True)
        for step in np.unique(row.step_index[row.loss_mask])
    }
    moved = []
    for row, old in zip(target_rows, target_values, strict=True):
        new = old.copy()
        for step in np.unique(row.step_index[row.loss_mask]):
            if (row.episode, int(step)) in by_step:
                new[row.step_index == step] = by_step[row.episode, int(step)]
        moved.append(new)
    return moved


def token_weights(rows: Sequence[Row], aggregation: Aggregation) -> list[Row]:
    """Rows with the weight of each action token; the loss of the mini-batch is then one weighted sum.

    With M steps of A_j action tokens and E episodes of S_e steps: `seq-mean-token-mean` 1/(M·A_j),
    `seq-mean-token-sum` 1/M, `token-mean` 1/ΣA_j, `episode-mean` 1/(E·S_e·A_j). Masked tokens and rows with zero
    advantage count.

    Args:
        rows: All rows of one mini-batch: of all micro-batches and all devices.
        aggregation: How tokens are averaged.
    """
    lengths = Counter((row.episode, int(step)) for row in rows for step in row.step_index[row.loss_mask])
    steps = Counter(episode for episode, _ in lengths)
    weight = {
        "seq-mean-token-mean": lambda episode, length: 1 / (len(lengths) * length),
        "seq-mean-token-sum": lambda episode, length: 1 / len(lengths),
        "token-mean": lambda episode, length: 1 / lengths.total(),
        "episode-mean": lambda episode, length: 1 / (len(steps) * steps[episode] * length),
    }[aggregation]
    weighted = []
    for row in rows:
        values = np.zeros(len(row.token_ids), np.float32)
        for step in np.unique(row.step_index[row.loss_mask]):
            values[row.step_index == step] = weight(row.episode, lengths[row.episode, int(step)])
        weighted.append(dataclasses.replace(row, token_weight=values))
    return weighted


def drop_unlikely_steps(rows: Sequence[Row], mask_sign: Literal["all", "negative"] = "all") -> list[Row]:
    """The released code's mask: a step with any `denominator_logprobs` below log δ leaves the loss whole.

    The weights of the step become 0 (counts in the other weights stay), KL and entropy included, and the row's
    per-token mask is off. Rows without a threshold stay as they are.

    Args:
        rows: Weighted rows with `denominator_logprobs`.
        mask_sign: Steps it may drop: all, or those with a negative advantage.
    """
    kept = []
    for row in rows:
        if row.mask_threshold == 0:
            kept.append(row)
            continue
        if row.denominator_logprobs is None:
            raise ValueError("the row mask needs denominator_logprobs")
        unlikely = row.loss_mask & (row.denominator_logprobs < math.log(row.mask_threshold))
        if mask_sign == "negative":
            unlikely &= row.advantages < 0
        dropped = np.isin(row.step_index, row.step_index[unlikely])
        weight = np.where(dropped, 0, row.token_weight).astype(np.float32)
        kept.append(dataclasses.replace(row, token_weight=weight, mask_threshold=0.0))
    return kept


def minibatches(steps_N: Sequence[int], minibatch_steps: int, order: Int[np.ndarray, " N"]) -> list[list[int]]:
    """Whole episodes in the given order, taken until their steps reach the count; the last part may be smaller.

    Args:
        steps_N: Steps (actions) of each episode.
        minibatch_steps: Steps at which a mini-batch is full.
        order: A permutation of the episode indices.
    """
    batches: list[list[int]] = []
    count = minibatch_steps
    for episode in order:
        if count >= minibatch_steps:
            batches.append([])
            count = 0
        batches[-1].append(int(episode))
        count += steps_N[episode]
    return batches
