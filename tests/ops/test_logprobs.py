"""Chunked log-probabilities against plain log-softmax: values, entropies and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empo2_jax.ops.logprobs import token_logprobs

N, D, V = 13, 5, 11


def inputs() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, head = jax.random.normal(keys[0], (N, D)), jax.random.normal(keys[1], (V, D))
    return hidden, head, jax.random.randint(keys[2], (N,), 0, V), jax.random.normal(keys[3], (2, N))


def naive(hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
    logprobs = jax.nn.log_softmax(hidden @ head.T / temperature)
    return logprobs[jnp.arange(N), targets], -(jnp.exp(logprobs) * logprobs).sum(1)


@pytest.mark.parametrize("chunk", [1, 4, 13, 512])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_values_and_gradients_equal_the_naive_form(chunk: int, temperature: float) -> None:
    hidden, head, targets, cotangent = inputs()

    def scalar(function, hidden, head):
        logprobs, entropy = function(hidden, head)
        return (cotangent[0] * logprobs + cotangent[1] * entropy).sum(), (logprobs, entropy)

    def run(function):
        return jax.value_and_grad(lambda h, w: scalar(function, h, w), argnums=(0, 1), has_aux=True)(hidden, head)

    found = jax.jit(lambda: run(lambda h, w: token_logprobs(h, w, targets, temperature, chunk)))()
    wanted = run(lambda h, w: naive(h, w, targets, temperature))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, wanted)


def test_uniform_logits() -> None:
    logprobs, entropy = token_logprobs(jnp.zeros((3, D)), jnp.ones((V, D)), jnp.arange(3, dtype=jnp.int32))
    np.testing.assert_allclose(logprobs, -np.log(V), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(V), rtol=1e-6)


def test_bfloat16_states_give_f32_results_and_an_f32_head_gradient() -> None:
    hidden, head, targets, _ = inputs()
    hidden = hidden.astype(jnp.bfloat16)
    logprobs, entropy = token_logprobs(hidden, head, targets, chunk=4)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    gradient = jax.grad(lambda w: token_logprobs(hidden, w, targets, chunk=1)[0].sum())(head)
    exact = jax.grad(lambda w: naive(hidden.astype(jnp.float32), w, targets, 1.0)[0].sum())(head)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, exact, atol=0.05)


def test_the_whole_table_of_logits_never_exists() -> None:
    count, vocabulary, chunk = 64, 1000, 4

    def loss(hidden, head):
        return token_logprobs(hidden, head, jnp.zeros(count, jnp.int32), chunk=chunk)[0].sum()

    shapes = jax.ShapeDtypeStruct((count, D), jnp.float32), jax.ShapeDtypeStruct((vocabulary, D), jnp.float32)
    memory = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < count * vocabulary * 4 / 2
