"""Episodes to rows: which prompt the loss sees, which tokens it counts, and with what weight (paper section 4.2).

A row is one token sequence. It continues while the next prompt starts with everything so far; otherwise a new row
begins, so that an append-only prompt gives one row per episode and a rebuilt one gives a row per step. Where tips stand
in the newest turn alone, the row is the prompt without tips, and every prompt with tips is a branch of the part that
the two share. Rows are built from the ids of the episode; nothing is tokenized, cut or re-rendered here.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float32, Float64, Int, Int32

from empo2_jax.types import Branch, Episode, Mode, Row, Step

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "episode-mean"]


def build_rows(
    episodes: Sequence[Episode],
    advantages: Sequence[float | Float64[np.ndarray, " _"]],
    *,
    min_token_prob: float = 0.0,
    mask_modes: Literal["off_policy", "all"] = "off_policy",
    branch_room: int | None = None,
) -> list[Row]:
    """Rows under P_loss: the prompt without tips, except in `ON_POLICY_WITH_MEMORY`.

    Args:
        episodes: The valid episodes of an iteration; `Row.episode` is the index in this list.
        advantages: Of each episode, one value per step, or one for all; the action tokens of a step share it.
        min_token_prob: δ, the threshold of the probability mask; 0 = off.
        mask_modes: Rows the threshold applies to.
        branch_room: None: a prompt with tips is a sequence like any other. A number: it is a branch of the prompt
            without tips where the two differ, and a row has at most so many tokens of branches.

    Returns:
        Rows in episode and step order, with `token_weight` 0 until `token_weights` sets it.
    """
    rows = []
    for index, (episode, advantage) in enumerate(zip(episodes, advantages, strict=True)):
        masked = mask_modes == "all" or episode.mode == Mode.OFF_POLICY
        threshold = min_token_prob if masked else 0.0
        tips = episode.mode == Mode.ON_POLICY_WITH_MEMORY
        by_step = np.broadcast_to(advantage, len(episode.steps))
        rows += _episode_rows(episode, index, tips, by_step, threshold, branch_room)
    return rows


def acting_rows(episodes: Sequence[Episode], branch_room: int | None = None) -> list[Row]:
    """Rows of the `OFF_POLICY` episodes under P_act, the prompt with tips; for forward passes, never for the loss.

    In the other modes P_act is P_loss. Move what is computed on them with `transfer`; with a `branch_room` (see
    `build_rows`) their trunks are the prompt without tips, so that one forward pass has both.
    """
    rows = []
    for index, episode in enumerate(episodes):
        if episode.mode == Mode.OFF_POLICY:
            rows += _episode_rows(episode, index, True, np.zeros(len(episode.steps)), 0.0, branch_room)
    return rows


@dataclasses.dataclass
class _Tokens:
    """A growing part of a row."""

    ids: list[int] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)
    behavior: list[float] = dataclasses.field(default_factory=list)
    loss: list[bool] = dataclasses.field(default_factory=list)

    def context(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.steps += [-1] * len(ids)
        self.behavior += [0.0] * len(ids)
        self.loss += [False] * len(ids)

    def action(self, step: Step, number: int, loss: bool) -> None:
        self.ids += step.action_ids.tolist()
        self.steps += [number] * len(step.action_ids)
        self.behavior += step.behavior_logprobs.tolist()
        self.loss += [loss] * len(step.action_ids)

    def before(self, other: "_Tokens") -> "_Tokens":
        return _Tokens(
            self.ids + other.ids, self.steps + other.steps, self.behavior + other.behavior, self.loss + other.loss
        )


def _episode_rows(
    episode: Episode,
    index: int,
    tips: bool,
    by_step: Float64[np.ndarray, " S"],
    threshold: float,
    branch_room: int | None,
) -> list[Row]:
    rows: list[Row] = []
    trunk, side, branches = _Tokens(), _Tokens(), list[Branch]()

    def finish() -> None:
        if trunk.ids:
            rows.append(_row(trunk.before(side), tuple(branches), episode.mode, index, by_step, threshold))

    for number, step in enumerate(episode.steps):
        acting = step.prompt_ids if tips else step.bare_prompt_ids
        prompt = acting if branch_room is None else step.bare_prompt_ids
        ids, branching = prompt.tolist(), not np.array_equal(acting, prompt)
        cut = _shared(acting, prompt)
        length = len(acting) - cut + len(step.action_ids)
        if ids[: len(trunk.ids)] != trunk.ids:
            finish()
            trunk, side, branches = _Tokens(), _Tokens(), []
        elif branching and branches and branch_room is not None and len(side.ids) + length > branch_room:
            finish()
            repeated, trunk, side, branches = trunk.ids, _Tokens(), _Tokens(), []
            trunk.context(repeated)
        trunk.context(ids[len(trunk.ids) :])
        trunk.action(step, number, not branching)
        if branching:
            side.context(acting[cut:].tolist())
            side.action(step, number, True)
            branches.append(Branch(cut, length))
    finish()
    return rows


def _shared(acting: Int32[np.ndarray, " _"], prompt: Int32[np.ndarray, " _"]) -> int:
    """Length of the common prefix without the last token of `acting`, which predicts the action."""
    limit = min(len(acting) - 1, len(prompt))
    differ = np.flatnonzero(acting[:limit] != prompt[:limit])
    return int(differ[0]) if differ.size else limit


def _row(
    tokens: _Tokens,
    branches: tuple[Branch, ...],
    mode: Mode,
    episode: int,
    by_step: Float64[np.ndarray, " S"],
    threshold: float,
) -> Row:
    mask, step_index = np.asarray(tokens.loss, bool), np.asarray(tokens.steps, np.int32)
    return Row(
        token_ids=np.asarray(tokens.ids, np.int32),
        loss_mask=mask,
        step_index=step_index,
        behavior_logprobs=np.where(mask, tokens.behavior, 0.0).astype(np.float32),
        advantages=np.where(mask, by_step[step_index], 0.0).astype(np.float32),
        token_weight=np.zeros(len(mask), np.float32),
        mode=mode,
        episode=episode,
        mask_threshold=threshold,
        branches=branches,
    )


def transfer(
    source_rows: Sequence[Row],
    source_values: Sequence[Float32[np.ndarray, " _"]],
    target_rows: Sequence[Row],
    target_values: Sequence[Float32[np.ndarray, " _"]],
    *,
    trunk: bool = False,
) -> list[Float32[np.ndarray, " _"]]:
    """Copy values of action tokens to the loss tokens of the same episode, step and offset in other rows.

    Args:
        source_rows: Rows under one prompt, for example `acting_rows`.
        source_values: One value per token of each source row.
        target_rows: Rows under another prompt.
        target_values: What the result holds where no source row has the step, and off the loss tokens.
        trunk: Take the copy of an action on the trunk, not the one in the loss.

    Returns:
        One array per target row.
    """
    by_step = {}
    for row, values in zip(source_rows, source_values, strict=True):
        taken = (row.step_index >= 0) & (np.arange(len(row.step_index)) < row.trunk) if trunk else row.loss_mask
        by_step |= {
            (row.episode, int(step)): values[taken & (row.step_index == step)]
            for step in np.unique(row.step_index[taken])
        }
    moved = []
    for row, old in zip(target_rows, target_values, strict=True):
        new = old.copy()
        for step in np.unique(row.step_index[row.loss_mask]):
            if (row.episode, int(step)) in by_step:
                new[row.loss_mask & (row.step_index == step)] = by_step[row.episode, int(step)]
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
            values[row.loss_mask & (row.step_index == step)] = weight(row.episode, lengths[row.episode, int(step)])
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
