"""Log-probabilities and entropies of tokens, and losses on them, in chunks so that [N, V] never exists.

Temperature enters as in sampling: everything is log-softmax(logits / temperature) over the full vocabulary (paper
section 4.2 needs the same for masks and ratios). Top-p and top-k have no place here.

A loss that is a sum over tokens is differentiated chunk by chunk while the chunk's logits are at hand: three products
as wide as the vocabulary per token, where a backward pass after all log-probs would compute the logits again. Only so
many chunks run as there are tokens to score, a number that is known while running.

Inside `jax.shard_map` the head may be one part of the vocabulary: each chunk then costs a maximum and three sums over
the mesh axes, [chunk] each. The tokens may be split over one of these axes too; a chunk is then exchanged over it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

CHUNK = 512  # tokens whose logits exist at a time
TokenLoss = Callable[[Float32[Array, " n"], Float32[Array, " n"], Any], tuple[Float32[Array, ""], Any]]


class Split(NamedTuple):
    """Mesh axes of an enclosing `jax.shard_map`; none = one device has everything."""

    vocabulary: tuple[str, ...] = ()  # over which the head is split in equal parts
    tokens: str | None = None  # one of these, over which the tokens are split too


_WHOLE = Split()


class _Chunk(NamedTuple):
    logits: Float32[Array, "n V"]  # as they come out of the product: relative ones would be a second such array
    largest: Float32[Array, " n"]
    own: Int32[Array, " n"]  # target as a row of this device's head, out of range on the others
    log_total: Float32[Array, " n"]  # of the logits relative to the largest
    logprobs: Float32[Array, " n"]
    entropy: Float32[Array, " n"]


def token_logprobs(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    targets: Int32[Array, " N"],
    temperature: float | Float[Array, ""] = 1.0,
    *,
    count: Int32[Array, ""] | None = None,
    chunk: int = CHUNK,
    split: Split = _WHOLE,
) -> tuple[Float32[Array, " N"], Float32[Array, " N"]]:
    """Log-probability of each target and entropy of its distribution, nats. Not made to be differentiated.

    Args:
        hidden: Final hidden state that predicts each target.
        head: Output matrix, of any type; cast to that of `hidden` inside a chunk.
        targets: Token ids; any valid id where the result is not used.
        temperature: Divides the logits; above 0.
        count: Tokens to score, the first ones, the same on all devices; 0 is returned for chunks beyond. None = all.
        chunk: Tokens whose logits exist at a time, f32[chunk, V].
        split: What other devices have.
    """
    size, tokens = _chunks(chunk, split, (hidden, targets))
    empty = jnp.zeros(len(tokens[1]), jnp.float32)

    def score(index: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        states, ids = (_gathered(part, split) for part in _cut(tokens, index, size))
        scored = _score(states, head, ids, temperature, split.vocabulary)
        values = _own_part((scored.logprobs, scored.entropy), size, split)
        return jax.tree.map(lambda all_, new: _put(all_, new, index * size), done, values)

    logprobs, entropy = jax.lax.fori_loop(0, _trips(count, size, len(empty)), score, (empty, empty))
    return logprobs[: len(targets)], entropy[: len(targets)]


def token_loss(
    hidden: Float[Array, "N D"],
    head: Float32[Array, "V D"],
    targets: Int32[Array, " N"],
    given: Any,
    loss: TokenLoss,
    temperature: float = 1.0,
    *,
    count: Int32[Array, ""] | None = None,
    chunk: int = CHUNK,
    split: Split = _WHOLE,
) -> tuple[Float32[Array, ""], Any, Float[Array, "N D"], Float32[Array, "V D"]]:
    """A sum over tokens of a function of log-prob and entropy, with its gradients.

    Args:
        hidden: Final hidden state that predicts each target.
        head: f32 master of the output matrix; its gradient is summed over chunks in f32.
        targets: Token ids; any valid id where `loss` ignores the token.
        given: Arrays [N, …] that `loss` gets the chunk's part of; zeros where the last chunk is padded.
        loss: From log-probs and entropies f32[n], nats, and the part of `given` to the sum over these tokens and to
            other sums; must give nothing for tokens to be ignored.
        temperature: Divides the logits; above 0.
        count: Tokens in the sum, the first ones, the same on all devices; the rest of a chunk is seen too. None = all.
        chunk: Tokens whose logits exist at a time, f32[chunk, V].
        split: What other devices have. The sums are then of this device's tokens alone.

    Returns:
        The loss, the other sums, the gradient of `hidden`, and the gradient of this part of `head`.
    """
    size, tokens = _chunks(chunk, split, (hidden, targets, given))

    def add(index: Array, done: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        sums, to_hidden, to_head = done
        own_states, own_ids, facts = _cut(tokens, index, size)
        states, ids = _gathered(own_states, split), _gathered(own_ids, split)
        scored = _score(states, head, ids, temperature, split.vocabulary)
        values = _own_part((scored.logprobs, scored.entropy), size, split)
        value, pull, others = jax.vjp(lambda *pair: loss(*pair, facts), *values, has_aux=True)
        slopes = [_gathered(part, split) for part in pull(jnp.ones_like(value))]
        to_logits = (_logit_gradient(scored, *slopes) / temperature).astype(states.dtype)
        wide = {"preferred_element_type": jnp.float32}
        part = jnp.einsum("nv,vd->nd", to_logits, head.astype(states.dtype), **wide)
        to_head = to_head + jnp.einsum("nv,nd->vd", to_logits, states, **wide)
        to_hidden = _put(to_hidden, _summed(part, split).astype(hidden.dtype), index * size)
        return jax.tree.map(jnp.add, sums, (value, others)), to_hidden, to_head

    blank = jnp.zeros(size, jnp.float32)
    sums = jax.eval_shape(loss, blank, blank, _cut(tokens[2], jnp.int32(0), size))
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums)
    start = (start, jnp.zeros_like(tokens[0]), jnp.zeros(head.shape, jnp.float32))
    (value, others), to_hidden, to_head = jax.lax.fori_loop(0, _trips(count, size, len(tokens[1])), add, start)
    return value, others, to_hidden[: len(targets)], to_head


def _score(
    states: Float[Array, "n D"], head: Float[Array, "V D"], ids: Int32[Array, " n"], temperature: Any, axes: Any
) -> _Chunk:
    logits = jnp.einsum("nd,vd->nv", states, head.astype(states.dtype), preferred_element_type=jnp.float32)
    logits = logits / temperature
    largest = jax.lax.pmax(logits.max(axis=1), axes)
    relative = logits - largest[:, None]
    weights, own = jnp.exp(relative), ids - jax.lax.axis_index(axes) * head.shape[0]
    here = (own >= 0) & (own < head.shape[0])
    chosen = jnp.take_along_axis(logits, jnp.where(here, own, 0)[:, None], axis=1)[:, 0] - largest
    sums = weights.sum(axis=1), (weights * relative).sum(axis=1), jnp.where(here, chosen, 0.0)
    total, energy, chosen = jax.lax.psum(sums, axes)
    log_total = jnp.log(total)
    return _Chunk(logits, largest, own, log_total, chosen - log_total, log_total - energy / total)


def _logit_gradient(
    scored: _Chunk, of_logprob: Float32[Array, " n"], of_entropy: Float32[Array, " n"]
) -> Float32[Array, "n V"]:
    """∂ log p_a / ∂ z_v = [v = a] − p_v and ∂ H / ∂ z_v = −p_v (log p_v + H), weighted and summed."""
    relative = scored.logits - scored.largest[:, None]
    probability = jnp.exp(relative - scored.log_total[:, None])
    offset = of_logprob + of_entropy * (scored.entropy - scored.log_total)
    common = -probability * (offset[:, None] + of_entropy[:, None] * relative)
    chosen = jnp.arange(common.shape[1], dtype=jnp.int32)[None] == scored.own[:, None]
    return common + jnp.where(chosen, of_logprob[:, None], 0.0)


def _chunks(chunk: int, split: Split, tokens: Any) -> tuple[int, Any]:
    """Tokens of this device in a chunk, and all of them padded to whole chunks."""
    count = len(jax.tree.leaves(tokens)[0])
    size = min(max(1, chunk // (jax.lax.axis_size(split.tokens) if split.tokens else 1)), count)
    return size, jax.tree.map(lambda x: jnp.pad(x, [(0, -count % size)] + [(0, 0)] * (x.ndim - 1)), tokens)


def _trips(count: Int32[Array, ""] | None, size: int, padded: int) -> Int32[Array, ""] | int:
    return padded // size if count is None else (count + size - 1) // size


def _cut(tokens: Any, index: Int32[Array, ""], size: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * size, size), tokens)


def _put(values: Float[Array, "N ..."], part: Float[Array, "n ..."], start: Int32[Array, ""]) -> Float[Array, "N ..."]:
    return jax.lax.dynamic_update_slice_in_dim(values, part, start, 0)


def _gathered(part: Array, split: Split) -> Array:
    return jax.lax.all_gather(part, split.tokens, tiled=True) if split.tokens else part


def _own_part(values: Any, size: int, split: Split) -> Any:
    return _cut(values, jax.lax.axis_index(split.tokens), size) if split.tokens else values


def _summed(part: Float32[Array, "n D"], split: Split) -> Float32[Array, "m D"]:
    """Over the parts of the vocabulary, for the tokens of this device."""
    others = tuple(axis for axis in split.vocabulary if axis != split.tokens)
    part = jax.lax.psum(part, others)
    return jax.lax.psum_scatter(part, split.tokens, tiled=True) if split.tokens else part
