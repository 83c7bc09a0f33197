"""Suite `logp`: log-probs of tokens over a whole vocabulary with their gradients, chunked against log-softmax + gather.

Both sides are JAX: what is measured is the algorithm of `ops/logprobs.py`, under a loss that needs no entropies. Bytes
are the compiler's own account of the program's temporaries.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from empo2_jax.bench.base import Case, Side
from empo2_jax.ops.logprobs import token_loss

TOLERANCES = {"mean_logprob": 1e-5, "hidden_gradient": 1e-5, "head_gradient": 1e-5}
_Answers = tuple[Array, Array, Array]  # sum of the log-probs, gradients of hidden states and head
Gradients = Callable[[Float32[Array, "N D"], Float32[Array, "V D"], Int32[Array, " N"], Float32[Array, " N"]], _Answers]


def cases(quick: bool) -> list[Case]:
    """4,096 tokens; a quick run times a vocabulary of 32,000 and only compiles the one of 151,936."""
    return [
        _case("32k", 4096, 32_000, 512, timed=True),
        _case("152k", 4096, 151_936, 896, timed=not quick),
    ]


def _case(name: str, tokens: int, vocabulary: int, width: int, timed: bool) -> Case:
    return Case(
        name=f"logp/{name}" if timed else f"logp/{name} (compiled only)",
        ours="empo2_jax.bench.logp:ours",
        peer="empo2_jax.bench.logp:naive",
        arguments={"tokens": tokens, "vocabulary": vocabulary, "width": width, "timed": timed},
        tolerances=TOLERANCES if timed else {},
        unit="token",
        flops=6.0 * vocabulary * width,
        timed=timed,
    )


def ours(tokens: int, vocabulary: int, width: int, timed: bool) -> Side:
    """The trainer's own function."""

    def gradients(hidden: Array, head: Array, ids: Array, weights: Array) -> _Answers:
        def loss(logprobs: Array, entropy: Array, given: tuple[Array, Array]) -> tuple[Array, Array]:
            weights, ones = given  # zeros in the padding of a chunk
            return jnp.sum(logprobs * weights), jnp.sum(logprobs * ones)

        _, total, to_hidden, to_head = token_loss(hidden, head, ids, (weights, jnp.ones_like(weights)), loss)
        return total, to_hidden, to_head

    return _side(gradients, tokens, vocabulary, width, timed)


def naive(tokens: int, vocabulary: int, width: int, timed: bool) -> Side:
    """All logits at once."""

    def gradients(hidden: Array, head: Array, ids: Array, weights: Array) -> _Answers:
        def loss(hidden: Array, head: Array) -> tuple[Array, Array]:
            logprobs = jnp.take_along_axis(jax.nn.log_softmax(hidden @ head.T), ids[:, None], axis=1)[:, 0]
            return jnp.sum(logprobs * weights), jnp.sum(logprobs)

        slopes, total = jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
        return total, *slopes

    return _side(gradients, tokens, vocabulary, width, timed)


def _side(gradients: Gradients, tokens: int, vocabulary: int, width: int, timed: bool) -> Side:
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache does not know its temporaries
    generator = np.random.default_rng(0)
    weights = generator.standard_normal(tokens).astype(np.float32)
    ids = generator.integers(0, vocabulary, tokens, np.int32)

    def run(hidden: Array, head: Array) -> _Answers:
        return gradients(hidden, head, jnp.asarray(ids), jnp.asarray(weights))

    abstract = (jax.ShapeDtypeStruct((rows, width), jnp.float32) for rows in (tokens, vocabulary))
    compiled = jax.jit(run).lower(*abstract).compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "the compiler reports its buffers"
    figures = {"temporary_bytes": float(memory.temp_size_in_bytes)}
    if not timed:
        return Side(lambda: None, figures=lambda: figures)
    hidden = jnp.asarray(generator.standard_normal((tokens, width), np.float32))
    head = jnp.asarray(0.02 * generator.standard_normal((vocabulary, width), np.float32))
    total, hidden_gradient, head_gradient = jax.block_until_ready(compiled(hidden, head))
    answers = {
        "mean_logprob": np.array(float(total) / tokens),
        "hidden_gradient": np.asarray(hidden_gradient),
        "head_gradient": np.asarray(head_gradient[:: max(1, vocabulary // 1000)]),
    }
    return Side(
        lambda: jax.block_until_ready(compiled(hidden, head)),
        answer=lambda: answers,
        figures=lambda: figures,
        work=tokens,
    )
