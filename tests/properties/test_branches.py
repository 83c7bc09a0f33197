"""Packed rows, trunks with branches and histories, against every step as a sequence of its own.

The reference is a plain call of the model on each step's whole prompt and action, and the loss in a few lines of its
own. Ledgers are away from the policy: ratios are not 1.
"""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2_jax.data.packing import branch_room, fits, pack
from empo2_jax.data.rows import acting_rows, build_rows, token_weights
from empo2_jax.learner.ledgers import fill, scorer
from empo2_jax.learner.step import Learner
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.types import Episode, Mode, Row, Step
from tests.fixtures.episodes import make_episode
from tests.fixtures.meshes import OBJECTIVE, SHAPE

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "episode-mean")
TEMPERATURE, DELTA = 0.7, 1e-4
LENGTH, STEPS = 48, 16  # of a step, of all episodes of an example
SIZES = (((48,), 192), ((48,), 96))  # two chunks of branches; rows that are split

pytestmark = pytest.mark.medium

actions = st.lists(st.lists(st.integers(20, 80), min_size=1, max_size=4), min_size=1, max_size=4)
drawings = st.lists(st.tuples(actions, st.sampled_from(Mode)), min_size=1, max_size=4)


@cache
def start() -> tuple[Learner, Any]:
    graphdef, params = nnx.split(Qwen2(SHAPE, rngs=nnx.Rngs(0)))
    keep = optax.trace(decay=0.0)  # its state is the gradient as it came
    return Learner(graphdef, keep, OBJECTIVE, temperature=TEMPERATURE, remat="full"), params


def built(drawing: list[tuple[list[list[int]], Mode]], latest: bool, seed: int) -> list[Episode]:
    random = np.random.default_rng(seed)
    tips = [random.integers(0, 9, len(actions)).tolist() if latest else None for actions, _ in drawing]
    return [make_episode(actions, mode=mode, latest=tip) for (actions, mode), tip in zip(drawing, tips, strict=True)]


class Ledgers:
    """Values of every action token by episode and step."""

    def __init__(self, episodes: list[Episode], seed: int):
        random = np.random.default_rng(seed)
        self.advantages = random.normal(size=len(episodes)).tolist()
        self.values = {
            (index, number): random.uniform((-9, -9, 0.5), (-3, -3, 2.0), (len(step.action_ids), 3)).T
            for index, episode in enumerate(episodes)
            for number, step in enumerate(episode.steps)
        }

    def on(self, row: Row) -> Row:
        filled = np.zeros((3, len(row.token_ids)), np.float32)
        for step in np.unique(row.step_index[row.loss_mask]):
            filled[:, row.loss_mask & (row.step_index == step)] = self.values[row.episode, int(step)]
        names = ("denominator_logprobs", "reference_logprobs", "rollout_weight")
        return dataclasses.replace(row, **dict(zip(names, filled, strict=True)))


def weight(episodes: list[Episode], index: int, step: Step, aggregation: str) -> float:
    steps = [step for episode in episodes for step in episode.steps]
    own = len(step.action_ids)
    return {
        "token-mean": 1 / sum(len(step.action_ids) for step in steps),
        "seq-mean-token-sum": 1 / len(steps),
        "seq-mean-token-mean": 1 / (len(steps) * own),
        "episode-mean": 1 / (len(episodes) * len(episodes[index].steps) * own),
    }[aggregation]


def samples(episodes: list[Episode], ledgers: Ledgers, aggregation: str) -> dict[str, np.ndarray]:
    """Each step under its loss prompt, from the left of a sequence that nothing else is in."""
    arrays = {name: np.zeros((STEPS, LENGTH), np.float32) for name in ("old", "ref", "correction", "A", "w")}
    arrays["ids"] = np.zeros((STEPS, LENGTH), np.int32)
    place = 0
    for index, episode in enumerate(episodes):
        for number, step in enumerate(episode.steps):
            tips = episode.mode == Mode.ON_POLICY_WITH_MEMORY
            prompt = step.prompt_ids if tips else step.bare_prompt_ids
            end = len(prompt) + len(step.action_ids)
            arrays["ids"][place, :end] = np.concatenate([prompt, step.action_ids])
            at = (place, slice(len(prompt), end))
            arrays["old"][at], arrays["ref"][at], arrays["correction"][at] = ledgers.values[index, number]
            arrays["A"][at], arrays["w"][at] = ledgers.advantages[index], weight(episodes, index, step, aggregation)
            place += 1
    return arrays


def plain_table(params: Any, ids: jax.Array) -> jax.Array:
    """Log-softmax for the token at every place but the first, [R, L - 1, V]."""
    model: Qwen2 = nnx.merge(start()[0]._graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
    hidden = model(ids, positions, jnp.ones_like(ids))
    return jax.nn.log_softmax(hidden[:, :-1] @ model.head.T / TEMPERATURE)


def plain_loss(params: Any, arrays: dict[str, jax.Array]) -> jax.Array:
    table = plain_table(params, arrays["ids"])
    logprobs = jnp.take_along_axis(table, arrays["ids"][:, 1:, None], -1)[..., 0]
    old, ref, correction, A, w = (arrays[name][:, 1:] for name in ("old", "ref", "correction", "A", "w"))
    ratio = jnp.exp(logprobs - old)
    surrogate = jnp.maximum(-A * ratio, -A * jnp.clip(ratio, 0.8, 1.3))
    surrogate = jnp.where(A < 0, jnp.minimum(surrogate, -A * 3.0), surrogate)
    likely = jax.lax.stop_gradient(jnp.exp(logprobs)) >= DELTA
    kl = jnp.exp(ref - logprobs) - (ref - logprobs) - 1
    entropy = -jnp.sum(jnp.exp(table) * table, axis=-1)
    return jnp.sum(w * (surrogate * correction * likely + 0.05 * jnp.clip(kl, -10, 10) - 0.01 * entropy))


plain_gradient = jax.jit(jax.value_and_grad(plain_loss))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(drawing=drawings, latest=st.booleans(), size=st.sampled_from(SIZES), seed=st.integers(0, 1000))
@settings(max_examples=4)
def test_loss_and_gradient_are_those_of_every_step_alone(aggregation, drawing, latest, size, seed) -> None:
    learner, params = start()
    episodes = built(drawing, latest, seed)
    ledgers = Ledgers(episodes, seed)
    room = branch_room(*size) if latest else None
    rows = build_rows(episodes, ledgers.advantages, min_token_prob=DELTA, mask_modes="all", branch_room=room)
    assert all(fits(row, *size) for row in rows)
    rows = token_weights([ledgers.on(row) for row in rows], aggregation)
    random = np.random.default_rng(seed)
    batches = pack([rows[index] for index in random.permutation(len(rows))], *size).batches
    state, sums = learner.update(learner.init(jax.tree.map(jnp.copy, params)), batches)
    loss, gradient = plain_gradient(params, samples(episodes, ledgers, aggregation))
    np.testing.assert_allclose(sums["loss"], loss, rtol=1e-5, atol=1e-5)
    assert sums["tokens"].sum() == sum(len(step.action_ids) for episode in episodes for step in episode.steps)
    assert sums["logprob_gap"].sum() / sums["tokens"].sum() > 0.01
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    for found, wanted in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * largest)


@given(drawing=drawings, size=st.sampled_from(SIZES), seed=st.integers(0, 1000))
@settings(max_examples=4)
def test_one_forward_pass_gives_the_log_probs_under_both_prompts(drawing, size, seed) -> None:
    learner, params = start()
    episodes = built(drawing, True, seed)
    room = branch_room(*size)
    rows = [*build_rows(episodes, [0.0] * len(episodes), branch_room=room), *acting_rows(episodes, room)]
    found = {"trunk": {}, "branch": {}}
    for row, values in zip(rows, scorer(learner, params, *size)(rows), strict=True):
        for place in np.flatnonzero(row.step_index >= 0):
            part = found["trunk" if place < row.trunk else "branch"]
            part.setdefault((row.episode, int(row.step_index[place])), []).append(float(values[place]))
    for index, episode in enumerate(episodes):
        for number, step in enumerate(episode.steps):
            ids = np.zeros((2, STEPS, LENGTH), np.int32)
            for prompt, row in ((step.bare_prompt_ids, ids[0, 0]), (step.prompt_ids, ids[1, 0])):
                row[: len(prompt) + len(step.action_ids)] = np.concatenate([prompt, step.action_ids])
            (bare, acting) = (
                table(params, each)[0, len(prompt) - 1 :][np.arange(len(step.action_ids)), step.action_ids]
                for each, prompt in zip(ids, (step.bare_prompt_ids, step.prompt_ids), strict=True)
            )
            trunk = found["trunk"][index, number]
            branch = found["branch"].get((index, number))
            assert (branch is None) == (np.array_equal(step.prompt_ids, step.bare_prompt_ids))
            for some in np.split(np.asarray(trunk), len(trunk) // len(bare)):  # twice if both kinds of rows have it
                np.testing.assert_allclose(some, bare, rtol=0, atol=1e-5)
            if branch is not None:
                np.testing.assert_allclose(branch, acting, rtol=0, atol=1e-5)


table = jax.jit(plain_table)


@pytest.mark.parametrize("denominator", ["student", "behavior"])
def test_ledgers_and_the_gap_between_both_prompts_are_those_of_every_step_alone(denominator: str) -> None:
    learner, params = start()
    size = SIZES[1]
    episodes = built([([[30, 31], [40], [50, 51, 52]], mode) for mode in Mode], True, 3)
    room = branch_room(*size)
    rows = build_rows(episodes, [1.0] * 3, branch_room=room)
    score = scorer(learner, params, *size)
    filled, metrics = fill(
        rows, episodes, score, denominator=denominator, correction_cap=2.0, reference=score, branch_room=room
    )
    logprobs = partial(alone, params)
    gaps = {
        mode: np.concatenate([logprobs(s, True) - logprobs(s, False) for s in episodes[mode].steps]) for mode in Mode
    }
    for mode in (Mode.ON_POLICY_WITH_MEMORY, Mode.OFF_POLICY):
        assert np.abs(gaps[mode]).max() > 0.01
        assert metrics[f"empo2/{mode.label}/kl_tips_vs_bare"] == pytest.approx(gaps[mode].mean(), abs=1e-5)
    seen = set()
    for row in filled:
        assert row.denominator_logprobs is not None and row.rollout_weight is not None
        for number in np.unique(row.step_index[row.loss_mask]):
            step, at = episodes[row.mode].steps[number], row.loss_mask & (row.step_index == number)
            loss_has_tips = row.mode == Mode.ON_POLICY_WITH_MEMORY
            tips = loss_has_tips or (row.mode == Mode.OFF_POLICY and denominator == "behavior")
            np.testing.assert_allclose(row.denominator_logprobs[at], logprobs(step, tips), rtol=0, atol=1e-5)
            if row.reference_logprobs is not None:
                np.testing.assert_allclose(row.reference_logprobs[at], logprobs(step, loss_has_tips), rtol=0, atol=1e-5)
            expected = np.minimum(2.0, np.exp(logprobs(step, True) - step.behavior_logprobs))
            np.testing.assert_allclose(row.rollout_weight[at], expected, rtol=2e-5)
            seen.add((row.mode, int(number)))
    assert len(seen) == 9


def alone(params: Any, step: Step, tips: bool) -> np.ndarray:
    prompt = step.prompt_ids if tips else step.bare_prompt_ids
    ids = np.zeros((STEPS, LENGTH), np.int32)
    ids[0, : len(prompt) + len(step.action_ids)] = np.concatenate([prompt, step.action_ids])
    places = len(prompt) - 1 + np.arange(len(step.action_ids))
    return np.asarray(table(params, ids))[0, places, step.action_ids]
