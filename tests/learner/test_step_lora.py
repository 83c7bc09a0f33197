"""The learner with adapters: the base is never touched, the state is small, and it is saved and resumed exactly."""

from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from empo2_jax.checkpoint import CheckpointStore, check_same_base
from empo2_jax.config import LoraConfig, UpdateConfig, parse_config
from empo2_jax.data.packing import pack
from empo2_jax.data.rows import build_rows, token_weights
from empo2_jax.errors import CheckpointError
from empo2_jax.learner.optim import policy_optimizer
from empo2_jax.learner.step import Learner, LearnerState, supervised_loss
from empo2_jax.models.lora import adapt, merged, split
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.sharding import make_mesh, shardings
from empo2_jax.run_record import check_same_run
from empo2_jax.types import TrainBatch
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
LORA = LoraConfig(enabled=True, rank=4, targets=("q_proj", "v_proj", "up_proj"))
ADAPTER_VALUES = 2 * 4 * ((16 + 16) + (16 + 8) + (16 + 24))  # layers, rank, in + out of each target
OPTIMIZER = policy_optimizer(UpdateConfig(learning_rate=0.01))


def batches() -> list[TrainBatch]:
    episodes = [make_episode(action) for action in ([[5, 6], [7]], [[8, 9, 3]], [[4], [2, 2]])]
    return pack(token_weights(build_rows(episodes, [1.0] * 3), "token-mean"), [16], 32).batches


def start() -> tuple[Learner, LearnerState, Any, Qwen2]:
    """Learner, first state, frozen parameters and the base, on a mesh of one device as in a run."""
    mesh = make_mesh(jax.devices(), 1, 1, 1)
    graphdef, params = nnx.split(Qwen2(SHAPE, rngs=nnx.Rngs(0)))
    base = nnx.merge(graphdef, jax.device_put(params, shardings(params, mesh)))
    graphdef, adapters, frozen = split(adapt(base, LORA, 0, mesh))
    learner = Learner(graphdef, OPTIMIZER, supervised_loss, frozen=frozen, temperature=1.0, remat="full", mesh=mesh)
    return learner, learner.init(adapters), frozen, base


def sizes(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_the_first_logprobs_are_the_bases_bit_for_bit_and_merging_follows_the_updates() -> None:
    learner, state, frozen, base = start()
    graphdef, params = nnx.split(base)
    plain = Learner(graphdef, OPTIMIZER, supervised_loss, temperature=1.0, remat="full", mesh=learner._mesh)
    batch = batches()[0]
    np.testing.assert_array_equal(learner.logprobs(state.params, batch), plain.logprobs(params, batch))
    chex.assert_trees_all_equal(merged(state.params, frozen, LORA.scale), params)
    losses = []
    for _ in range(4):
        state, sums = learner.update(state, batches())
        losses.append(float(sums["loss"]))
    assert losses == sorted(losses, reverse=True) and losses[0] - losses[-1] > 0.1
    unmerged = learner.logprobs(state.params, batch)
    assert np.abs(unmerged[0] - plain.logprobs(params, batch)[0]).max() > 0.01
    served = merged(state.params, frozen, LORA.scale)
    np.testing.assert_allclose(plain.logprobs(served, batch), unmerged, atol=1e-5)
    assert [leaf.sharding for leaf in jax.tree.leaves(served)] == [leaf.sharding for leaf in jax.tree.leaves(params)]


def test_only_the_adapter_has_gradients_and_moments_and_changes() -> None:
    learner, state, frozen, base = start()
    assert (sizes(state.params), sizes(state.opt_state)) == (ADAPTER_VALUES, 2 * ADAPTER_VALUES + 1)
    before, first = jax.tree.map(np.array, frozen), jax.tree.map(np.array, state.params)
    compiled = set()
    for _ in range(3):
        state, _ = learner.update(state, batches())
        compiled.add((learner._accumulate._cache_size(), learner._apply._cache_size()))
    assert compiled == {(1, 1)}
    chex.assert_trees_all_equal(frozen, before, strict=True)
    assert all(
        one is other for one, other in zip(jax.tree.leaves(frozen), jax.tree.leaves(nnx.split(base)[1]), strict=True)
    )
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(frozen))
    same = jax.tree.map(lambda one, other: np.array_equal(one, other), first, state.params)
    assert not any(jax.tree.leaves(same))


def test_a_saved_adapter_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    learner, state, _, _ = start()
    store = CheckpointStore(tmp_path, keep=1)
    state, _ = learner.update(state, batches())
    store.save(1, state=state, dumps={}, cursor={"metrics_lines": 0, "base": "ab"})
    straight, _ = learner.update(state, batches())
    learner, fresh, _, _ = start()
    restored, folder, cursor = store.restore(1, fresh)
    check_same_base(tmp_path, cursor, "ab", folder)
    resumed, _ = learner.update(LearnerState(*restored), batches())
    chex.assert_trees_all_equal(jax.tree.leaves(resumed), jax.tree.leaves(straight), strict=True)
    with pytest.raises(CheckpointError, match=r"its adapter belongs to other weights than those in elsewhere"):
        check_same_base(tmp_path, cursor, "cd", Path("elsewhere"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": 4}, "with lora.rank = 16, now it is 4; use another run.dir or the old values"),
        (
            {"targets": ["q_proj"]},
            r"with lora.targets = \('q_proj', .*\), now it is \('q_proj',\); use another run.dir",
        ),
        ({"enabled": False}, "with lora.enabled = True, now it is False; use another run.dir or the old values"),
    ],
)
def test_a_run_goes_on_with_its_own_adapters_only(changed: dict[str, Any], message: str) -> None:
    saved, now = ({"lora": {"enabled": True, **more}} for more in ({}, changed))
    with pytest.raises(CheckpointError, match=message):
        check_same_run(parse_config(saved), parse_config(now))
