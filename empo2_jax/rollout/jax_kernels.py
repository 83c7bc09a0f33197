"""The compiled functions of the engine: copy slots, append prompt tokens, sample.

Caches are donated and updated in place; shapes come from small sets of buckets that the caller chooses, and sampling
settings are arrays: new values never compile anything. The only static arguments are the model's structure and `width`,
the cache columns that are read.

Not here: which slot, which bucket, what is cached (`jax_engine.py`, `slots.py`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from empo2_jax.models.qwen2 import KVCache
from empo2_jax.ops.logprobs import token_logprobs

NOISE_BLOCK = 128  # tokens of a block in two-level Gumbel-argmax


Place = NamedSharding | None  # of the cache on a mesh: slots over `data` and `fsdp`, key/value heads over `tensor`


class SlotSampling(NamedTuple):
    """`Sampling` of every slot as arrays."""

    keys: UInt32[np.ndarray | Array, "S 2"]
    temperature: Float32[np.ndarray | Array, " S"]  # 0 = greedy
    top_p: Float32[np.ndarray | Array, " S"]
    banned_from: Int32[np.ndarray | Array, " S"]
    stop_ids: Int32[np.ndarray | Array, "S stops"]  # padded with -1
    limits: Int32[np.ndarray | Array, " S"]  # tokens to sample now, 0 = the slot takes no part


@partial(jax.jit, static_argnames="place", donate_argnames="cache")
def copy_slots(cache: KVCache, pairs: Int32[Array, "S 2"], count: Int32[Array, ""], place: Place) -> KVCache:
    """Copy whole slots: the first `count` pairs of (source, target)."""

    def step(index: Array, cache: KVCache) -> KVCache:
        source, target = pairs[index]
        return jax.tree.map(lambda part: part.at[target].set(part[source]), cache)

    return _pin(jax.lax.fori_loop(0, count, step, cache), place)


@partial(jax.jit, static_argnames=("graphdef", "width", "place"), donate_argnames=("cache", "hidden"))
def extend(
    graphdef: nnx.GraphDef,
    params: Any,
    cache: KVCache,
    hidden: Float[Array, "S D"],
    slots: Int32[Array, " R"],
    token_ids: Int32[Array, "R Tb"],
    lengths: Int32[Array, " R"],
    counts: Int32[Array, " R"],
    targets: Int32[Array, "R Tb"] | None,
    width: int,
    place: Place,
) -> tuple[Float[Array, "S D"], KVCache, Float32[Array, "R Tb"] | None]:
    """Append tokens to some slots and keep the hidden state of each one's last token.

    With `targets`, the tokens that follow each one, also their log-probabilities (at temperature 1).
    """
    model = nnx.merge(graphdef, params)
    rows = jax.tree.map(lambda part: part.at[slots, :, :width].get(mode="clip"), cache)
    states, rows = model.extend(rows, token_ids, lengths, counts, width)
    cache = jax.tree.map(lambda part, row: part.at[slots, :, :width].set(row, mode="drop"), cache, rows)
    last = jnp.take_along_axis(states, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    scores = None
    if targets is not None:
        flat = states.reshape(-1, states.shape[-1])
        scores = token_logprobs(flat, model.head, targets.reshape(-1))[0].reshape(targets.shape)
    return hidden.at[slots].set(last, mode="drop"), _pin(cache, place), scores


class _Loop(NamedTuple):
    """What the decode loop carries."""

    cache: KVCache
    lengths: Int32[Array, " S"]  # tokens in the cache
    active: Bool[Array, " S"]
    last: Int32[Array, " S"]  # sampled last, not yet in the cache
    ids: Int32[Array, "S M"]
    logprobs: Float32[Array, "S M"]
    counts: Int32[Array, " S"]  # tokens sampled


@partial(jax.jit, static_argnames=("graphdef", "width", "place"), donate_argnames="cache")
def decode(
    graphdef: nnx.GraphDef,
    params: Any,
    cache: KVCache,
    hidden: Float[Array, "S D"],
    lengths: Int32[Array, " S"],
    last: Int32[Array, " S"],
    sampling: SlotSampling,
    width: int,
    place: Place,
) -> tuple[KVCache, Int32[Array, "S M"], Float32[Array, "S M"], Int32[Array, " S"]]:
    """Sample until every slot met a stop id or its limit; the last token sampled is not put into the cache.

    Args:
        graphdef: Structure of the model.
        params: Its weights.
        cache: Keys and values of every slot.
        hidden: State that predicts the first token of a slot whose `last` is -1 (from `extend`).
        lengths: Tokens in the cache.
        last: Token that an earlier call sampled last, to be appended first; -1 = none.
        sampling: How, and how many tokens.
        width: Cache columns that are read; at least `lengths` plus what is sampled.
        place: Where the cache lies.
    """
    model = nnx.merge(graphdef, params)
    slots, _, columns, _ = cache.keys[0].shape
    narrow = jax.tree.map(lambda part: part[:, :, :width], cache)  # once, not in every step of the loop

    def sample(hidden: Float[Array, "S D"], lengths: Int32[Array, " S"]) -> tuple[Array, Array]:
        logits = jnp.einsum("sd,vd->sv", hidden, model.head.astype(hidden.dtype), preferred_element_type=jnp.float32)
        return draw_tokens(logits, lengths, sampling)

    def record(loop: _Loop, drawn: tuple[Array, Array], drawing: Bool[Array, " S"]) -> _Loop:
        ids, logprobs = drawn
        places = jnp.arange(slots), jnp.where(drawing, loop.counts, columns)
        counts = loop.counts + drawing
        stopped = (ids[:, None] == sampling.stop_ids).any(axis=1) | (counts >= sampling.limits)
        return loop._replace(
            active=loop.active & ~(drawing & stopped),
            last=jnp.where(drawing, ids, loop.last),
            ids=loop.ids.at[places].set(ids, mode="drop"),
            logprobs=loop.logprobs.at[places].set(logprobs, mode="drop"),
            counts=counts,
        )

    def body(loop: _Loop) -> _Loop:
        count = loop.active.astype(jnp.int32)
        states, cache = model.extend(loop.cache, loop.last[:, None], loop.lengths, count, width)
        lengths = loop.lengths + count
        drawn = sample(states[:, 0], lengths)
        return record(loop._replace(cache=cache, lengths=lengths), drawn, loop.active)

    zeros = jnp.zeros((slots, columns), jnp.int32)
    start = _Loop(
        cache=narrow,
        lengths=lengths,
        active=jnp.asarray(sampling.limits) > 0,
        last=last,
        ids=zeros,
        logprobs=zeros.astype(jnp.float32),
        counts=jnp.zeros(slots, jnp.int32),
    )
    fresh = start.active & (last < 0)
    nothing = (jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.float32))
    first = jax.lax.cond(fresh.any(), sample, lambda *_: nothing, hidden, lengths)
    end = jax.lax.while_loop(lambda loop: loop.active.any(), body, record(start, first, fresh))
    cache = jax.tree.map(lambda part, row: part.at[:, :, :width].set(row), cache, end.cache)
    return _pin(cache, place), end.ids, end.logprobs, end.counts


def _pin(cache: KVCache, place: Place) -> KVCache:
    """The cache where it was, so that a donated one is updated in place."""
    return cache if place is None else jax.lax.with_sharding_constraint(cache, place)


def draw_tokens(
    logits: Float32[Array, "S V"], positions: Int32[Array, " S"], sampling: SlotSampling
) -> tuple[Int32[Array, " S"], Float32[Array, " S"]]:
    """One token per slot by Gumbel-argmax, with its log-probability at the temperature over the full vocabulary.

    Gumbel-argmax over blocks by their total probability, then inside the winner: the same distribution as over single
    tokens, for V / 128 + 128 noise values instead of V (at V = 32,000 noise for every token doubled the decode time).
    """
    greedy = (sampling.temperature == 0)[:, None]
    logits = logits / jnp.where(greedy, 1.0, sampling.temperature[:, None])
    allowed = jnp.where(jnp.arange(logits.shape[1])[None] < sampling.banned_from[:, None], logits, -jnp.inf)
    allowed = jax.lax.cond((sampling.top_p < 1).any(), _nucleus, lambda allowed, _: allowed, allowed, sampling.top_p)
    padding = -logits.shape[1] % NOISE_BLOCK
    blocks = jnp.pad(allowed, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    blocks = blocks.reshape(logits.shape[0], -1, NOISE_BLOCK)
    weights = jnp.where(greedy, blocks.max(axis=2), jax.nn.logsumexp(blocks, axis=2))
    noise = jax.vmap(partial(_noise, weights.shape[1] + NOISE_BLOCK))(jnp.asarray(sampling.keys), positions)
    outer, inner = jnp.split(jnp.where(greedy, 0.0, noise), [weights.shape[1]], axis=1)
    block = jnp.argmax(weights + outer, axis=1)
    members = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    ids = (block * NOISE_BLOCK + jnp.argmax(members + inner, axis=1)).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0]
    return ids, chosen - jax.nn.logsumexp(logits, axis=1)


def _noise(count: int, key: UInt32[Array, " 2"], position: Int32[Array, ""]) -> Float32[Array, " count"]:
    """Gumbel noise that belongs to one position of one request."""
    folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
    return jax.random.gumbel(folded, (count,))


def _nucleus(logits: Float32[Array, "S V"], top_p: Float32[Array, " S"]) -> Float32[Array, "S V"]:
    """Hide all but the smallest set of most likely tokens whose probability reaches `top_p`; 1 hides nothing."""
    order = jnp.argsort(-logits, axis=1)
    likely = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=1), axis=1)
    before = jnp.cumsum(likely, axis=1) - likely
    kept_sorted = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    kept_sorted = kept_sorted.at[:, 0].set(True)
    kept = jnp.put_along_axis(jnp.zeros_like(kept_sorted), order, kept_sorted, axis=1, inplace=False)
    return jnp.where(kept, logits, -jnp.inf)
