"""Suite `tree`: the update of one episode as one sequence against the same update on one sample per step.

Both sides use the package's own learner and packing; what differs is the rows that `data/rows.py` makes: of the whole
episode, whose prompts grow by appending, or of each step alone. Tips of the newest turn are branches of the one row and
part of every sample's prompt. Loss, log-probs and gradients are the same.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from empo2_jax.bench.base import Case, Side
from empo2_jax.bench.shapes import SHAPES, placed_model, prompts
from empo2_jax.bench.train import make_learner
from empo2_jax.data.packing import Packed, pack, unpack
from empo2_jax.data.rows import build_rows, token_weights
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.qwen2_sizes import QWEN2_5
from empo2_jax.planning import forward_flops
from empo2_jax.types import Episode, Mode, Row, Step, StopReason, Task

TOLERANCES = {"logprobs": 1e-5, "gradient": 1e-5}  # nats; share of the largest element
_BUCKET = 128  # sequences are a multiple of this
_ANY = 1 << 30  # tokens of branches
_HEADER = 4  # tokens of a prompt after the tips


def cases(quick: bool) -> list[Case]:
    """30 turns, or 8: 1,000 prompt tokens, then 32 of an action and 80 of an observation per turn; tips of 300."""
    turns, shape = (8, "mini") if quick else (30, "small")
    return [
        _case(f"tree/{turns} turns", shape, turns, 1000, 112, 32, 0),
        _case(f"tree/{turns} turns, tips", "mini", turns, 1000, 112, 32, 300),
    ]


def _case(name: str, shape: str, turns: int, prompt: int, growth: int, response: int, tips: int) -> Case:
    sizes = {"turns": turns, "prompt": prompt, "growth": growth, "response": response, "tips": tips}
    return Case(
        name=name,
        ours="empo2_jax.bench.tree:trunk",
        peer="empo2_jax.bench.tree:steps",
        arguments={"shape": shape, **sizes},
        tolerances=TOLERANCES,
        unit="episode",
        flops=3.0 * sum(_flops(SHAPES[shape], row) for row in _rows([make_episode(shape, **sizes)], _ANY)),
    )


def make_episode(shape: str, turns: int, prompt: int, growth: int, response: int, tips: int) -> Episode:
    """An episode of random tokens: every prompt without tips continues the one before, tips stand near its end."""
    history, observations = prompts(shape, 1, prompt, turns, growth)
    ids = history[0]
    steps = []
    for turn, tip in zip(observations, prompts(shape, turns, tips).first, strict=True):
        action, observation = turn[:response], turn[response:]
        logprobs = np.full(response, -math.log(SHAPES[shape].vocab_size), np.float32)
        acting = np.concatenate([ids[:-_HEADER], tip, ids[-_HEADER:]])
        steps.append(Step("", acting, ids, action, logprobs, "", "", "exact", 0.0, ""))
        ids = np.concatenate([ids, action, observation])
    task, mode = Task("bench", "", 0), Mode.ON_POLICY_WITH_MEMORY
    return Episode("i0/g0/e0", task, "", mode, tuple(steps), StopReason.DONE, 0.0, False, 0)


def trunk(shape: str, **sizes: int) -> Side:
    """One row, with a branch for each step that saw tips."""
    return _side(shape, _rows([make_episode(shape, **sizes)], _ANY))


def steps(shape: str, **sizes: int) -> Side:
    """A row per step, packed as the trainer packs rows."""
    episode = make_episode(shape, **sizes)
    return _side(shape, _rows([dataclasses.replace(episode, steps=(step,)) for step in episode.steps], None))


def _rows(episodes: Sequence[Episode], branch_room: int | None) -> list[Row]:
    rows = build_rows(episodes, [1.0] * len(episodes), branch_room=branch_room)
    rows = token_weights(rows, "seq-mean-token-mean")
    return [dataclasses.replace(row, denominator_logprobs=row.behavior_logprobs) for row in rows]


def _side(shape: str, rows: Sequence[Row]) -> Side:
    longest, branches = (
        -(-max(lengths) // _BUCKET) * _BUCKET
        for lengths in ([row.trunk for row in rows], [len(row.token_ids) - row.trunk for row in rows])
    )
    return update_side(shape, rows, pack(rows, [longest], longest + branches))


def update_side(shape: str, rows: Sequence[Row], packed: Packed) -> Side:
    """One update on packed rows.

    Args:
        shape: Name in `SHAPES`.
        rows: Rows in episode and step order.
        packed: All of them; all batches have one shape.
    """
    graphdef, params = placed_model(shape)
    learner = make_learner(graphdef)
    logprobs = [learner.logprobs(params, batch)[0] for batch in packed.batches]
    # An update without a gradient compiles everything and changes neither moments nor, but for the decay, weights.
    empty = packed.batches[0]._replace(token_weight=np.zeros_like(packed.batches[0].token_weight))
    state, _ = learner.update(learner.init(params), [empty])
    moments: list[np.ndarray] = []

    def run() -> None:
        nonlocal state
        state, _ = learner.update(state, packed.batches)
        jax.block_until_ready(state)
        if not moments:
            moments.extend(np.asarray(leaf).reshape(-1)[::101] for leaf in jax.tree.leaves(state.opt_state))

    def answer() -> dict[str, np.ndarray]:
        values = unpack(logprobs, packed.placements)
        acted = [part[row.loss_mask] for part, row in zip(values, rows, strict=True)]
        first = moments[: len(moments) // 2]  # the mean of the gradients; the other half is that of their squares
        gradient = np.concatenate(first)
        return {"logprobs": np.concatenate(acted), "gradient": gradient / np.abs(gradient).max()}

    figures = {"flops_7b": float(sum(_flops(QWEN2_5["7B"], row) for row in rows))}
    return Side(run, answer=answer, figures=lambda: figures)


def _flops(config: Qwen2Config, row: Row) -> int:
    """Of a forward pass of the row by itself, without padding: a branch sees `cut` tokens of the trunk too."""
    trunk = forward_flops(config, row.trunk, row.trunk, int(row.loss_mask.sum()))
    return trunk + sum(forward_flops(config, length, 2 * cut + length, 0) for cut, length in row.branches)
