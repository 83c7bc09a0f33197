"""The learner against a plain forward pass of the same tiny random model, all logits at once."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from empo2_jax.config import UpdateConfig
from empo2_jax.data.packing import pack, unpack
from empo2_jax.data.rows import build_rows, token_weights
from empo2_jax.errors import ConfigError
from empo2_jax.learner import optim
from empo2_jax.learner.optim import init_moments, policy_optimizer
from empo2_jax.learner.step import Learner, supervised_loss
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.sharding import make_mesh, shardings
from empo2_jax.ops.losses import policy_loss
from empo2_jax.types import Mode, Row, TrainBatch
from tests.fixtures.episodes import make_episode

SHAPE = Qwen2Config(
    vocab_size=97,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    tie_embeddings=True,
    initializer_range=0.3,
)
GRAPHDEF, PARAMS = nnx.split(Qwen2(SHAPE, rngs=nnx.Rngs(0)))
TEMPERATURE = 0.7
POLICY_LOSS = partial(policy_loss, clip_low=0.2, clip_high=0.3, dual_clip=10.0)


def fresh() -> Any:
    """Parameters that may be donated."""
    return jax.tree.map(jnp.copy, PARAMS)


def rows() -> list[Row]:
    actions = [[[5, 6], [7]], [[8, 9, 3]], [[4], [2, 2], [11]], [[60, 61]]]
    modes = [Mode.ON_POLICY, Mode.OFF_POLICY, Mode.ON_POLICY_WITH_MEMORY, Mode.ON_POLICY]
    episodes = [make_episode(action, mode=mode) for action, mode in zip(actions, modes, strict=True)]
    return token_weights(build_rows(episodes, [1.0, -0.5, 2.0, -1.5]), "seq-mean-token-mean")


def plain_logprobs(params: Any, batch: TrainBatch) -> jax.Array:
    """f32[B, T]: log-softmax(logits / temperature) of every token after the first; 0 off the mask."""
    model = nnx.merge(GRAPHDEF, params)
    hidden = model(*map(jnp.asarray, (batch.token_ids, batch.positions, batch.segment_ids)))
    table = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", hidden, model.head) / TEMPERATURE)
    chosen = jnp.take_along_axis(table[:, :-1], jnp.asarray(batch.token_ids)[:, 1:, None], axis=2)[..., 0]
    return jnp.where(batch.loss_mask, jnp.pad(chosen, ((0, 0), (1, 0))), 0.0)


def learner(objective: Callable = POLICY_LOSS, rate: float = 1.0, *, remat: str = "none") -> Learner:
    """Plain descent: the change of a parameter is minus the rate times its gradient."""
    return Learner(GRAPHDEF, optax.sgd(rate), objective, temperature=TEMPERATURE, remat=remat)


def gradient(step: Learner, batches: list[TrainBatch]) -> tuple[Any, dict[str, np.ndarray]]:
    state, sums = step.update(step.init(fresh()), batches)
    assert int(state.updates) == 1
    return jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), PARAMS, state.params), sums


def assert_trees_close(one: Any, other: Any) -> None:
    chex.assert_trees_all_close(nnx.to_pure_dict(one), nnx.to_pure_dict(other), atol=3e-6, rtol=1e-7)


@pytest.mark.parametrize(("bucket", "tokens"), [(16, 64), (64, 64), (16, 16)])
def test_logprobs_are_the_log_softmax_of_all_logits_at_the_training_temperature(bucket: int, tokens: int):
    packed = pack(rows(), [bucket], tokens)
    step = learner()
    for batch in packed.batches:
        logprobs, entropy = step.logprobs(PARAMS, batch)
        np.testing.assert_allclose(logprobs, plain_logprobs(PARAMS, batch), atol=2e-6)
        assert (logprobs[batch.loss_mask] < 0).all() and not logprobs[~batch.loss_mask].any()
        assert ((entropy > 0) == batch.loss_mask).all() and entropy.max() <= np.log(97)


def test_logprobs_do_not_depend_on_the_packing():
    step = learner()
    values = []
    for bucket, tokens in ((16, 16), (64, 64)):
        packed = pack(rows(), [bucket], tokens)
        values.append(unpack([step.logprobs(PARAMS, batch)[0] for batch in packed.batches], packed.placements))
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def ready(shift: float = 0.0) -> list[Row]:
    """Rows whose denominators are the current log-probs, moved by `shift` nats."""
    packed = pack(rows(), [16], 64)
    own = unpack([learner().logprobs(PARAMS, batch)[0] for batch in packed.batches], packed.placements)
    return [
        dataclasses.replace(row, denominator_logprobs=(values - shift * row.loss_mask).astype(np.float32))
        for row, values in zip(rows(), own, strict=True)
    ]


@pytest.mark.parametrize("shift", [0.0, 0.1, -0.15])
def test_gradients_of_micro_batches_add_up_to_that_of_one_batch(shift: float):
    whole, parts = pack(ready(shift), [16], 64).batches, pack(ready(shift), [16], 16).batches
    assert (len(whole), len(parts)) == (1, 2)
    (one, one_sums), (two, two_sums) = gradient(learner(), whole), gradient(learner(remat="full"), parts)
    assert_trees_close(one, two)
    assert one_sums.keys() == two_sums.keys()
    for name, value in one_sums.items():
        np.testing.assert_allclose(two_sums[name], value, rtol=1e-5, atol=1e-5)  # sums of last bits


def test_first_update_is_the_policy_gradient_and_its_ratios_are_one():
    (batch,) = pack(ready(), [16], 64).batches
    found, sums = gradient(learner(), [batch])
    np.testing.assert_allclose(sums["ratio"] / sums["tokens"], 1.0, atol=1e-6)
    np.testing.assert_allclose(sums["ratio_squared"], sums["tokens"], atol=1e-5)
    assert not sums["clipped"].any()
    assert sums["tokens"].tolist() == [5, 4, 3]

    def objective(params: Any) -> jax.Array:
        return -jnp.sum(batch.token_weight * batch.advantages * plain_logprobs(params, batch))

    expected = jax.grad(objective)(PARAMS)
    assert_trees_close(found, expected)
    norm = np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(expected)))
    assert float(sums["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    weighted = float(np.sum(batch.token_weight * batch.advantages))
    assert float(sums["loss"]) == float(sums["pg_loss"]) == pytest.approx(-weighted, rel=1e-5)


def adamw(objective: Callable = POLICY_LOSS) -> Learner:
    """The optimizer of a run, whose state has moments and a count."""
    return Learner(GRAPHDEF, policy_optimizer(UpdateConfig()), objective, temperature=TEMPERATURE, remat="none")


def poisoned(batch: TrainBatch, value: float) -> TrainBatch:
    """One token's advantage is `value`."""
    advantages = batch.advantages.copy()
    advantages[tuple(np.argwhere(batch.loss_mask)[0])] = value
    return batch._replace(advantages=advantages)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_changes_nothing_and_the_next_one_counts(value: float):
    step = adamw()
    good = pack(ready(), [16], 16).batches
    assert len(good) == 2
    state, sums = step.update(step.init(fresh()), good)
    assert not sums["skipped"] and int(state.updates) == 1
    before = jax.tree.map(np.asarray, state)
    state, sums = step.update(state, [poisoned(good[0], value), good[1]])
    assert sums["skipped"] and not np.isfinite([sums["grad_norm"], sums["loss"]]).all()
    chex.assert_trees_all_equal(state, before, strict=True)
    state, sums = step.update(state, good)
    assert not sums["skipped"] and int(state.updates) == 2
    assert not np.array_equal(jax.tree.leaves(state.params)[0], jax.tree.leaves(before.params)[0])


def test_later_updates_compile_nothing():
    traces = []

    def objective(*batch: Any) -> Any:
        traces.append(len(batch))
        return POLICY_LOSS(*batch)

    step = adamw(objective)
    whole, parts = pack(ready(0.1), [16], 32).batches[0], pack(ready(), [16], 32).batches
    placed = jax.device_put(fresh(), shardings(PARAMS, make_mesh(jax.devices(), 1, 1, 1)))  # as in a run
    state, _ = step.update(step.init(placed), [whole, whole])  # the warm-up
    compiled = [step._logprobs._cache_size(), step._accumulate._cache_size(), step._apply._cache_size()]
    traces.clear()
    for batch in (*parts, poisoned(whole, np.nan)):  # new weights, new numbers, a skipped update
        state, _ = step.update(state, [batch, batch, whole])
    sizes = [step._logprobs._cache_size(), step._accumulate._cache_size(), step._apply._cache_size()]
    assert sizes == compiled == [0, 1, 1]
    assert not traces


def test_a_batch_must_divide_over_the_mesh():
    step = learner()
    step.row_multiple = 3
    with pytest.raises(ConfigError, match="a batch of 4 rows does not divide over data × fsdp = 3 devices"):
        step.logprobs(PARAMS, pack(rows(), [16], 64).batches[0])


def test_moments_in_host_memory_need_such_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optim, "HOST_MEMORY", "no_such_kind")
    with pytest.raises(ConfigError, match=r"offload_moments = true: the devices have no memory of kind no_such_kind"):
        init_moments(policy_optimizer(UpdateConfig()), fresh(), offload=True)


def test_supervised_loss_is_the_weighted_negative_log_likelihood():
    (batch,) = pack(rows(), [16], 64).batches
    _, sums = gradient(learner(supervised_loss), [batch])
    expected = -float(jnp.sum(batch.token_weight * plain_logprobs(PARAMS, batch)))
    assert float(sums["loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.medium
def test_moments_keep_the_sharding_of_their_parameter_over_updates_and_restores(run_on_devices):
    source = """
import jax, numpy as np, tempfile
from pathlib import Path
from flax import nnx
from empo2_jax.checkpoint import CheckpointStore
from empo2_jax.config import UpdateConfig
from empo2_jax.data.packing import pack
from empo2_jax.data.rows import build_rows, token_weights
from empo2_jax.learner.optim import policy_optimizer
from empo2_jax.learner.step import Learner, supervised_loss
from empo2_jax.models.sharding import make_mesh, shardings
from tests.fixtures.episodes import make_episode
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.qwen2_config import Qwen2Config

shape = Qwen2Config(vocab_size=96, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8,
                    intermediate_size=24, tie_embeddings=True)
graphdef, params = nnx.split(Qwen2(shape, rngs=nnx.Rngs(0)))
whole, optimizer = params, policy_optimizer(UpdateConfig())
folder = Path(tempfile.mkdtemp())

def start(mesh, offload):
    learner = Learner(graphdef, optimizer, supervised_loss, temperature=1.0, remat="none", mesh=mesh,
                      offload_moments=offload)
    return learner, learner.init(jax.device_put(jax.tree.map(jax.numpy.copy, whole), shardings(whole, mesh)))

def check(state, offload):
    places = [leaf.sharding for leaf in jax.tree.leaves(state.params)]
    assert len({str(place.spec) for place in places}) > 2
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert len(moments) == 2 * len(places)
    for leaf, place in zip(moments, places * 2, strict=True):
        assert leaf.sharding.spec == place.spec, (leaf.sharding, place)
        assert leaf.sharding.memory_kind == ("pinned_host" if offload else "device"), leaf.sharding
    assert {place.memory_kind for place in places} == {"device"}
    scalars = [leaf for leaf in jax.tree.leaves((state.opt_state, state.updates)) if not leaf.ndim]
    assert scalars and all(leaf.sharding.is_fully_replicated for leaf in scalars)
    assert all(len(leaf.sharding.device_set) == 4 for leaf in scalars)

rows = token_weights(build_rows([make_episode([[5, 6]])], [1.0]), "token-mean")
(batch,) = pack(rows, [16], 64).batches
alone, _ = start(make_mesh(jax.devices(), 1, 1, 1), False)
print(-float(np.sum(batch.token_weight * alone.logprobs(whole, batch)[0])))

for step, offload in enumerate((False, True)):
    learner, state = start(make_mesh(jax.devices(), 1, 2, 2), offload)
    check(state, offload)
    before = [leaf.sharding for leaf in jax.tree.leaves(state)]
    state, sums = learner.update(state, [batch])
    print(float(sums["loss"]))
    check(state, offload)
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == before
    store = CheckpointStore(folder, 9)
    store.save(step, state=state, dumps={}, cursor={})
    learner, fresh = start(make_mesh(jax.devices(), 2, 1, 2), not offload)  # another mesh, moments elsewhere
    before = [leaf.sharding for leaf in jax.tree.leaves(fresh)]
    restored = type(fresh)(*store.restore(step, fresh)[0])
    check(restored, not offload)
    assert [leaf.sharding for leaf in jax.tree.leaves(restored)] == before
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)
    restored, sums = learner.update(restored, [batch])
    check(restored, not offload)
    print(float(sums["loss"]))
"""
    alone, first, second, *others = map(float, run_on_devices(4, source).split())
    assert first == pytest.approx(alone, rel=1e-5) and first > second  # the restored state went on
    assert others == pytest.approx([first, second], rel=1e-5)
