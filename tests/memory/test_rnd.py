"""Random network distillation: gradients, what is learned pays less, other states less so; dumps and bad dumps."""

from pathlib import Path

import numpy as np
import pytest

from empo2_jax.errors import CheckpointError
from empo2_jax.memory.hashing_embedder import HashingEmbedder
from empo2_jax.memory.rnd import RandomDistillation, gradient

DIMENSION = 32


def novelty(seed: int = 0, coefficient: float = 2.0) -> RandomDistillation:
    return RandomDistillation(DIMENSION, coefficient=coefficient, learning_rate=1e-3, seed=seed)


def states(*texts: str) -> np.ndarray:
    return HashingEmbedder(DIMENSION).embed(texts)


def test_gradient_is_that_of_the_mean_squared_error() -> None:
    rng = np.random.default_rng(0)
    shapes = {"in": (3, 4), "in_bias": (4,), "out": (4, 2), "out_bias": (2,)}
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    inputs, wanted = rng.normal(size=(5, 3)), rng.normal(size=(5, 2))

    def loss(changed: dict[str, np.ndarray]) -> float:
        hidden = np.tanh(inputs @ changed["in"] + changed["in_bias"])
        answer = hidden @ changed["out"] + changed["out_bias"]
        return float(np.square(answer - wanted).sum(axis=1).mean())

    grads = gradient({n: w.astype(np.float32) for n, w in weights.items()}, inputs, wanted)
    for name, grad in grads.items():
        for place in np.ndindex(grad.shape):
            step = {**weights, name: weights[name].copy()}
            step[name][place] += 1e-5
            back = {**weights, name: weights[name].copy()}
            back[name][place] -= 1e-5
            np.testing.assert_allclose(grad[place], (loss(step) - loss(back)) / 2e-5, rtol=1e-3, atol=1e-5)


def test_an_unknown_state_pays_about_the_coefficient_and_a_known_one_little() -> None:
    store = novelty()
    seen, other = states("the vase is empty", "the oven is empty"), states("a green lamp shines in the hall")
    first, pending = store.episode_rewards("any", np.concatenate([seen, other]))
    np.testing.assert_allclose(first, 2.0, rtol=0.5)
    again, _ = store.episode_rewards("any", np.concatenate([seen, other]))
    np.testing.assert_array_equal(again, first)  # nothing changes before the commit
    for _ in range(200):
        store.commit([pending[:2]])
    later, _ = store.episode_rewards("any", np.concatenate([seen, other]))
    assert later[:2].max() < 0.02
    assert later[2] > 10 * later[:2].max()
    assert store.metrics() == {"states": 400}


def test_rewards_are_linear_in_the_coefficient() -> None:
    texts = states("a", "b c")
    one, two, none = (novelty(coefficient=c).episode_rewards("k", texts)[0] for c in (1.0, 2.0, 0.0))
    np.testing.assert_allclose(two, 2 * one, rtol=1e-6)
    assert not none.any()


def test_episodes_of_an_iteration_are_one_training_set() -> None:
    whole, parts = novelty(), novelty()
    texts = states("a", "b", "c d")
    whole.commit([texts])
    parts.commit([texts[:1], texts[1:]])
    assert whole.content_hash() == parts.content_hash() != novelty().content_hash()
    before = parts.content_hash()
    parts.commit([])
    assert parts.content_hash() == before


def test_a_dump_goes_on_as_the_original(tmp_path: Path) -> None:
    store, texts = novelty(), states("a", "b", "c d")
    store.commit([texts])
    store.dump(tmp_path)
    copy = novelty()
    copy.load(tmp_path)
    for one in (store, copy):
        one.commit([texts[:2]])
    assert copy.content_hash() == store.content_hash()
    assert novelty(seed=1).content_hash() != novelty().content_hash()


def test_bad_dumps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no predictor of novelty can be read"):
        novelty().load(tmp_path)
    RandomDistillation(5, coefficient=1.0, learning_rate=1e-3, seed=0).dump(tmp_path)
    with pytest.raises(CheckpointError, match="expected"):
        novelty().load(tmp_path)
