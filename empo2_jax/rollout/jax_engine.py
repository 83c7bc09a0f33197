"""The engine in this process: KV slots, prefix reuse and sampling in three compiled functions.

Every session owns a slot of one KV cache. `generate` finds what a slot already holds of the prompt (`slots.py`),
computes the rest in token buckets (`_extend`), and samples with one device loop that ends early (`_decode`); a new
session first copies the prefix it shares with another slot (`_copy`). Caches are donated and updated in place, shapes
come from small sets of buckets, weights are arguments: nothing is compiled again after a warm-up or a `load`.

A completion is a function of (weights, its request, the cached part of its session). Noise is drawn from (key,
position), every compiled shape has a fixed number of rows, and chunks are formed per row, so that neither the slot nor
the other requests of a call enter. The exceptions are numerical: the columns that `_decode` reads (`width`), a prefix
copied from a neighbor and a cache lost to eviction follow the other requests and can move the last bits of a
log-probability (measured: 5e-7 in f32 on a CPU). Whoever needs equal bits keeps the batches equal.

Not here: several hosts (one engine per process), text and chat templates (`chat.py`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from empo2_jax.errors import EngineError
from empo2_jax.models.qwen2 import KVCache, Qwen2, init_cache
from empo2_jax.rollout.base import Completion, Request
from empo2_jax.rollout.slots import Placement, SlotTable, TokenIds

EXTEND_BUCKETS = (16, 64, 256, 1024)  # tokens per row of one `_extend`
EXTEND_TOKENS = 2048  # rows × bucket of one `_extend`: few rows of long chunks, many of short ones
EXTEND_TOKENS_CPU = 256  # a full core needs no more, and rows that only pad cost as much as others
MIN_WIDTH = 256  # smallest number of cache columns read: fewer would compile more and save little
MAX_STOP_IDS = 8
NOISE_BLOCK = 128  # tokens of a block in two-level Gumbel-argmax


class SlotSampling(NamedTuple):
    """`Sampling` of every slot as arrays, so that new values never compile anything."""

    keys: UInt32[np.ndarray | Array, "S 2"]
    temperature: Float32[np.ndarray | Array, " S"]  # 0 = greedy
    top_p: Float32[np.ndarray | Array, " S"]
    banned_from: Int32[np.ndarray | Array, " S"]
    stop_ids: Int32[np.ndarray | Array, "S stops"]  # padded with -1
    limits: Int32[np.ndarray | Array, " S"]  # new tokens, 0 = the slot takes no part


class JaxEngine:
    """Serves a `Qwen2` from KV slots; implements `base.Engine`."""

    def __init__(self, model: Qwen2, *, slots: int, max_length: int, policy_version: int = 0):
        """Allocate the cache.

        Args:
            model: Architecture, compute dtype (also the cache's) and first weights.
            slots: Sessions with a cache; more requests than slots run in waves.
            max_length: Prompt + completion tokens of a session.
            policy_version: Version of the first weights.
        """
        if slots < 1 or max_length < 2:
            raise EngineError(f"slots {slots} and max_length {max_length}: at least 1 slot and 2 tokens are needed")
        self.max_length = max_length
        self._config, self._dtype = model.config, model.dtype
        self._graphdef, own = nnx.split(model)
        self._structure, self._shapes = jax.tree.structure(own), _shapes(own)
        self._table = SlotTable(slots, max_length)
        self._extend_tokens = EXTEND_TOKENS_CPU if jax.default_backend() == "cpu" else EXTEND_TOKENS
        self._cache = init_cache(self._config, slots, max_length, self._dtype)
        self._hidden = jnp.zeros((slots, self._config.hidden_size), self._dtype)
        self.load(own, policy_version)

    def load(self, params: Any, policy_version: int) -> None:
        """Serve these weights (the state of `nnx.split(model)`) and drop every cache.

        The arrays are kept, not copied: a trainer that donates its parameters must hand over a copy.

        Raises:
            EngineError: the weights have another structure or other shapes than the model.
        """
        if (found := _shapes(params)) != self._shapes:
            names = sorted(dict(found.items() ^ self._shapes.items()))
            raise EngineError(f"load: the weights do not fit the engine's model; first difference at {names[0]}")
        # One structure for all versions: differing variable metadata would compile everything again.
        self._params = jax.tree.unflatten(self._structure, jax.tree.leaves(params))
        self.policy_version = policy_version
        self._table.clear()

    def release(self, session: str) -> None:
        """Forget a session's cache; unknown sessions are ignored."""
        self._table.release(session)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one completion per request, in the order of the requests.

        Raises:
            EngineError: a prompt that does not fit, an unknown token id, an impossible sampling setting or a session
                that occurs twice. Nothing has run then.
        """
        for request in requests:
            self._check(request)
        sessions = [request.session for request in requests]
        if len(set(sessions)) < len(sessions):
            raise EngineError("a session occurs twice in one call of generate; one request per session is allowed")
        done: dict[int, Completion] = {}
        for wave in self._table.waves(sessions):
            done |= zip(wave, self._wave([requests[index] for index in wave]), strict=True)
        return [done[index] for index in range(len(requests))]

    def _check(self, request: Request) -> None:
        prompt, sampling, where = request.prompt_ids, request.sampling, f"session {request.session!r}"
        if not 1 <= len(prompt) < self.max_length:
            raise EngineError(f"{where}: prompt of {len(prompt)} tokens; 1 to {self.max_length - 1} are allowed")
        vocab = self._config.vocab_size
        if prompt.min() < 0 or prompt.max() >= vocab:
            raise EngineError(f"{where}: token ids {prompt.min()} to {prompt.max()}; 0 to {vocab - 1} are allowed")
        if sampling.max_tokens < 1 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            raise EngineError(f"{where}: {sampling}; max_tokens ≥ 1, temperature ≥ 0 and 0 < top_p ≤ 1 are allowed")
        if len(sampling.stop_ids) > MAX_STOP_IDS:
            raise EngineError(f"{where}: {len(sampling.stop_ids)} stop ids; at most {MAX_STOP_IDS} are allowed")
        if sampling.banned_from is not None and sampling.banned_from < 1:
            raise EngineError(f"{where}: banned_from {sampling.banned_from} bans every token; at least 1 is allowed")

    def _wave(self, requests: Sequence[Request]) -> list[Completion]:
        """At most as many requests as slots."""
        prompts = [request.prompt_ids for request in requests]
        placements = self._table.place([request.session for request in requests], prompts)
        self._prefill(prompts, placements)
        ids, logprobs, counts = self._sample(requests, placements)
        completions = []
        for request, placement in zip(requests, placements, strict=True):
            slot, stop_ids = placement.slot, request.sampling.stop_ids
            sampled = ids[slot, : counts[slot]].copy()
            self._table.commit(slot, np.concatenate([request.prompt_ids, sampled[:-1]]))  # the last has no KV yet
            completions.append(
                Completion(
                    ids=sampled,
                    logprobs=logprobs[slot, : counts[slot]].copy(),
                    stopped=int(sampled[-1]) in stop_ids,
                    cached_tokens=placement.cached,
                    policy_version=self.policy_version,
                )
            )
        return completions

    def _prefill(self, prompts: Sequence[TokenIds], placements: Sequence[Placement]) -> None:
        """Copy and compute every prompt, stage by stage; leaves the last hidden state of each in its slot's row."""
        for stage in range(max(placement.stage for placement in placements) + 1):
            members = [index for index, placement in enumerate(placements) if placement.stage == stage]
            self._copy_prefixes([placements[index] for index in members])
            pending = {placements[index].slot: (prompts[index], placements[index].cached) for index in members}
            while pending:
                for (bucket, width), slots in _group(pending, self.max_length).items():
                    rows = min(len(self._table), max(1, self._extend_tokens // bucket))
                    for start in range(0, len(slots), rows):
                        chunk = slots[start : start + rows]
                        work = [(slot, pending[slot][0], pending[slot][1]) for slot in chunk]
                        self._extend_rows(work, rows, bucket, width)
                    for slot in slots:
                        pending[slot] = (pending[slot][0], pending[slot][1] + bucket)
                pending = {slot: (ids, start) for slot, (ids, start) in pending.items() if start < len(ids)}

    def _copy_prefixes(self, placements: Sequence[Placement]) -> None:
        pairs = [(placement.source, placement.slot) for placement in placements if placement.source is not None]
        if pairs:
            padded = np.zeros((len(self._table), 2), np.int32)
            padded[: len(pairs)] = pairs
            self._cache = _copy(self._cache, padded, np.int32(len(pairs)))

    def _extend_rows(self, work: Sequence[tuple[int, TokenIds, int]], rows: int, bucket: int, width: int) -> None:
        """Compute the next `bucket` tokens of some (slot, prompt, tokens so far)."""
        slots = np.full(rows, len(self._table), np.int32)  # beyond the cache: reads are clipped, writes dropped
        token_ids = np.zeros((rows, bucket), np.int32)
        lengths, counts = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, (slot, prompt, start) in enumerate(work):
            piece = prompt[start : start + bucket]
            slots[row], lengths[row], counts[row] = slot, start, len(piece)
            token_ids[row, : len(piece)] = piece
        self._hidden, self._cache = _extend(
            self._graphdef, self._params, self._cache, self._hidden, slots, token_ids, lengths, counts, width=width
        )

    def _sample(
        self, requests: Sequence[Request], placements: Sequence[Placement]
    ) -> tuple[Int32[np.ndarray, "S M"], Float32[np.ndarray, "S M"], Int32[np.ndarray, " S"]]:
        """Decode all requests from the hidden states that `_prefill` left."""
        count = len(self._table)
        lengths = np.zeros(count, np.int32)
        sampling = SlotSampling(
            keys=np.zeros((count, 2), np.uint32),
            temperature=np.zeros(count, np.float32),
            top_p=np.ones(count, np.float32),
            banned_from=np.full(count, self._config.vocab_size, np.int32),
            stop_ids=np.full((count, MAX_STOP_IDS), -1, np.int32),
            limits=np.zeros(count, np.int32),
        )
        for request, placement in zip(requests, placements, strict=True):
            slot, wanted = placement.slot, request.sampling
            lengths[slot] = len(request.prompt_ids)
            sampling.keys[slot], sampling.temperature[slot] = request.key, wanted.temperature
            sampling.top_p[slot] = wanted.top_p
            if wanted.banned_from is not None:
                sampling.banned_from[slot] = wanted.banned_from
            sampling.stop_ids[slot, : len(wanted.stop_ids)] = wanted.stop_ids
            sampling.limits[slot] = min(wanted.max_tokens, self.max_length - lengths[slot])
        width = _width(int(np.max(lengths + sampling.limits)), self.max_length)
        self._cache, ids, logprobs, counts = _decode(
            self._graphdef, self._params, self._cache, self._hidden, lengths, sampling, width=width
        )
        return np.asarray(ids), np.asarray(logprobs), np.asarray(counts)


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}


def _width(length: int, max_length: int) -> int:
    """Cache columns to read for `length` tokens: a power of two, or all."""
    return min(max(MIN_WIDTH, 1 << (length - 1).bit_length()), max_length)


def _bucket(count: int) -> int:
    """Tokens of the next chunk of a row that still needs `count`: never more than half of it padding, if avoidable."""
    above = [bucket for bucket in EXTEND_BUCKETS if count <= bucket <= 2 * count]
    below = [bucket for bucket in EXTEND_BUCKETS if bucket <= count]
    return above[0] if above else below[-1] if below else EXTEND_BUCKETS[0]


def _group(pending: dict[int, tuple[TokenIds, int]], max_length: int) -> dict[tuple[int, int], list[int]]:
    """Slots by the (bucket, width) of their next chunk; both depend on the row alone."""
    groups: dict[tuple[int, int], list[int]] = {}
    for slot, (prompt, start) in pending.items():
        bucket = _bucket(len(prompt) - start)
        width = _width(min(start + bucket, len(prompt)), max_length)
        groups.setdefault((bucket, width), []).append(slot)
    return groups


@partial(jax.jit, donate_argnames="cache")
def _copy(cache: KVCache, pairs: Int32[Array, "S 2"], count: Int32[Array, ""]) -> KVCache:
    """Copy whole slots: the first `count` pairs of (source, target)."""

    def step(index: Array, cache: KVCache) -> KVCache:
        source, target = pairs[index]
        return jax.tree.map(lambda part: part.at[target].set(part[source]), cache)

    return jax.lax.fori_loop(0, count, step, cache)


@partial(jax.jit, static_argnames=("graphdef", "width"), donate_argnames=("cache", "hidden"))
def _extend(
    graphdef: nnx.GraphDef,
    params: Any,
    cache: KVCache,
    hidden: Float[Array, "S D"],
    slots: Int32[Array, " R"],
    token_ids: Int32[Array, "R Tb"],
    lengths: Int32[Array, " R"],
    counts: Int32[Array, " R"],
    width: int,
) -> tuple[Float[Array, "S D"], KVCache]:
    """Append tokens to some slots and keep the hidden state of each one's last token."""
    model = nnx.merge(graphdef, params)
    rows = jax.tree.map(lambda part: part.at[slots, :, :width].get(mode="clip"), cache)
    states, rows = model.extend(rows, token_ids, lengths, counts, width)
    cache = jax.tree.map(lambda part, row: part.at[slots, :, :width].set(row, mode="drop"), cache, rows)
    last = jnp.take_along_axis(states, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return hidden.at[slots].set(last, mode="drop"), cache


class _Loop(NamedTuple):
    """What the decode loop carries."""

    step: Int32[Array, ""]
    cache: KVCache
    lengths: Int32[Array, " S"]  # tokens in the cache
    active: Bool[Array, " S"]
    ids: Int32[Array, "S M"]
    logprobs: Float32[Array, "S M"]
    counts: Int32[Array, " S"]  # tokens sampled


@partial(jax.jit, static_argnames=("graphdef", "width"), donate_argnames="cache")
def _decode(
    graphdef: nnx.GraphDef,
    params: Any,
    cache: KVCache,
    hidden: Float[Array, "S D"],
    lengths: Int32[Array, " S"],
    sampling: SlotSampling,
    width: int,
) -> tuple[KVCache, Int32[Array, "S M"], Float32[Array, "S M"], Int32[Array, " S"]]:
    """Sample until every slot met a stop id or its limit; the last token sampled is not put into the cache."""
    model = nnx.merge(graphdef, params)
    slots, _, columns, _ = cache.keys[0].shape
    narrow = jax.tree.map(lambda part: part[:, :, :width], cache)  # once, not in every step of the loop

    def sample(loop: _Loop, hidden: Float[Array, "S D"]) -> _Loop:
        logits = jnp.einsum("sd,vd->sv", hidden, model.head.astype(hidden.dtype), preferred_element_type=jnp.float32)
        ids, logprobs = _draw(logits, loop.lengths, sampling)
        counts = loop.counts + loop.active
        stopped = (ids[:, None] == sampling.stop_ids).any(axis=1)
        return loop._replace(
            step=loop.step + 1,
            active=loop.active & ~stopped & (counts < sampling.limits),
            ids=loop.ids.at[:, loop.step].set(ids),
            logprobs=loop.logprobs.at[:, loop.step].set(logprobs),
            counts=counts,
        )

    def body(loop: _Loop) -> _Loop:
        last, active = loop.ids[:, loop.step - 1], loop.active.astype(jnp.int32)
        states, cache = model.extend(loop.cache, last[:, None], loop.lengths, active, width)
        return sample(loop._replace(cache=cache, lengths=loop.lengths + active), states[:, 0])

    zeros = jnp.zeros((slots, columns), jnp.int32)
    start = _Loop(
        step=jnp.int32(0),
        cache=narrow,
        lengths=lengths,
        active=jnp.asarray(sampling.limits) > 0,
        ids=zeros,
        logprobs=zeros.astype(jnp.float32),
        counts=jnp.zeros(slots, jnp.int32),
    )
    end = jax.lax.while_loop(lambda loop: loop.active.any(), body, sample(start, hidden))
    cache = jax.tree.map(lambda part, row: part.at[:, :, :width].set(row), cache, end.cache)
    return cache, end.ids, end.logprobs, end.counts


def _draw(
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
