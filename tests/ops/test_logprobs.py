"""Chunked log-probabilities against plain log-softmax: values, entropies and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empo2_jax.ops.logprobs import token_logprobs, token_loss

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
    hidden, head, targets, weights = inputs()

    def loss(logprobs, entropy, weights):
        return (weights[0] * logprobs**2 + weights[1] * entropy).sum(), {"logprobs": logprobs.sum()}

    def naive_loss(hidden, head):
        return loss(*naive(hidden, head, targets, temperature), weights)

    (value, sums), gradients = jax.value_and_grad(naive_loss, argnums=(0, 1), has_aux=True)(hidden, head)
    by_token = lambda *part: loss(*part[:2], part[2].T)  # noqa: E731
    found = jax.jit(lambda: token_loss(hidden, head, targets, weights.T, by_token, temperature, chunk=chunk))()
    wanted = (value, sums, *gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=4e-6), found[2:], wanted[2:])
    if N % chunk == 0 or chunk > N:  # else the padding of the last chunk is in these sums, which a loss must ignore
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), found[:2], wanted[:2])
    scored = jax.jit(lambda: token_logprobs(hidden, head, targets, temperature, chunk=chunk))()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        scored,
        naive(hidden, head, targets, temperature),
    )


@pytest.mark.parametrize("count", [0, 3, 4, 5, 13])
def test_only_the_chunks_that_are_needed_run(count: int) -> None:
    hidden, head, targets, _ = inputs()
    mask = (jnp.arange(N) < count).astype(jnp.float32)

    def loss(logprobs, entropy, mask):
        return -(mask * logprobs).sum(), mask.sum()

    def run(count):
        scored = token_logprobs(hidden, head, targets, chunk=4, count=count)
        return token_loss(hidden, head, targets, mask, loss, chunk=4, count=count), scored

    (value, tokens, to_hidden, to_head), (logprobs, entropy) = jax.jit(run)(jnp.int32(count))
    exact = naive(hidden, head, targets, 1.0)
    slopes = jax.grad(lambda h, w: -(mask * naive(h, w, targets, 1.0)[0]).sum(), argnums=(0, 1))(hidden, head)
    assert tokens == count
    np.testing.assert_allclose(value, -(mask * exact[0]).sum(), rtol=1e-6)
    np.testing.assert_allclose(to_hidden, slopes[0], atol=1e-6)
    np.testing.assert_allclose(to_head, slopes[1], atol=2e-6)
    np.testing.assert_allclose(logprobs[:count], exact[0][:count], rtol=2e-5)
    seen = min(-(-count // 4) * 4, N)
    assert (entropy[:seen] > 0).all() and not entropy[seen:].any() and not logprobs[seen:].any()


def test_uniform_logits() -> None:
    logprobs, entropy = token_logprobs(jnp.zeros((3, D)), jnp.ones((V, D)), jnp.arange(3, dtype=jnp.int32))
    np.testing.assert_allclose(logprobs, -np.log(V), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(V), rtol=1e-6)


def _sum(logprobs, entropy, mask):
    return (mask * logprobs).sum(), ()


def test_bfloat16_states_give_f32_results_and_an_f32_head_gradient() -> None:
    hidden, head, targets, _ = inputs()
    low = hidden.astype(jnp.bfloat16)
    logprobs, entropy = token_logprobs(low, head, targets, chunk=4)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    value, _, to_hidden, to_head = token_loss(low, head, targets, jnp.ones(N), _sum, chunk=4)
    exact = jax.grad(lambda w: naive(low.astype(jnp.float32), w, targets, 1.0)[0].sum())(head)
    assert (value.dtype, to_hidden.dtype, to_head.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(to_head, exact, atol=0.05)


def test_the_whole_table_of_logits_never_exists() -> None:
    count, vocabulary, chunk = 64, 1000, 4

    def run(hidden, head):
        return token_loss(hidden, head, jnp.zeros(count, jnp.int32), jnp.ones(count), _sum, chunk=chunk)

    shapes = jax.ShapeDtypeStruct((count, D), jnp.float32), jax.ShapeDtypeStruct((vocabulary, D), jnp.float32)
    memory = jax.jit(run).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < count * vocabulary * 4 / 2
