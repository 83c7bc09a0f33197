"""The engine in this process: KV slots, prefix reuse and sampling in three compiled functions.

Every job owns a slot of one KV cache while it runs. `admit` finds what a slot already holds of its prompt (`slots.py`),
copies the prefix it shares with another slot and computes the rest in token buckets; `decode` samples for all admitted
jobs with one device loop that ends early. `generate` is both in a row, and `batching.py` calls them in turn while
requests come and go. The compiled functions (`jax_kernels.py`) see few shapes, and weights are arguments: nothing is
compiled again after a warm-up or a `load`.

A completion is a function of (weights, its request, the cached part of its session). Noise is drawn from (key,
position), every compiled shape has a fixed number of rows, and chunks are formed per row, so that neither the slot nor
the other jobs enter. The exceptions are numerical: the columns that `decode` reads (`width`), a prefix copied from a
neighbor and a cache lost to eviction follow the other jobs and can move the last bits of a log-probability (measured:
5e-7 in f32 on a CPU). Whoever needs equal bits keeps the batches equal, as the trainer does.

Not here: several hosts (one engine per process), text and chat templates (`chat.py`).
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float32, Int32

from empo2_jax.errors import EngineError
from empo2_jax.models.hf_weights import named
from empo2_jax.models.qwen2 import Qwen2, init_cache
from empo2_jax.models.sharding import batch_shards, spec
from empo2_jax.rollout.base import MEMORY_PARTS, Completion, MemoryPart, Request
from empo2_jax.rollout.jax_kernels import SlotSampling, copy_slots, decode, extend
from empo2_jax.rollout.slots import Placement, SlotTable, TokenIds
from empo2_jax.rollout.stepwise import MAX_STOP_IDS, Job

EXTEND_BUCKETS = (16, 64, 256, 1024)  # tokens per row of one `extend`
EXTEND_TOKENS = 2048  # rows × bucket of one `extend`: few rows of long chunks, many of short ones
EXTEND_TOKENS_CPU = 256  # a full core needs no more, and rows that only pad cost as much as others
MIN_WIDTH = 256  # smallest number of cache columns read: fewer would compile more and save little


@dataclass
class _Seat:
    """A job in its slot."""

    job: Job
    policy_version: int  # whose KV the slot holds
    fresh: bool = True  # nothing sampled here yet: the next token comes from the prompt's last hidden state


@dataclass
class _Prefill:
    """A prompt on its way into a slot."""

    job: Job
    ids: TokenIds
    slot: int = -1
    cached: int = 0  # tokens in the cache at first
    done: int = 0  # tokens in the cache
    scores: list[Float32[np.ndarray, " _"]] = field(default_factory=list)  # of the tokens after those computed

    @property
    def score_from(self) -> int | None:
        """Where the job's scores begin, while they are still to be computed."""
        return self.job.score_from if self.job.prompt_logprobs is None else None

    @property
    def reusable(self) -> int:
        """Tokens that may come from a cache: at least the last one is computed, and all that predict a score."""
        return len(self.ids) - 1 if self.score_from is None else self.score_from

    @property
    def left(self) -> int:
        return len(self.ids) - self.done

    def keep_scores(self) -> None:
        """Hand the scores to the job; the last token computed predicts none of the prompt."""
        if self.score_from is not None:
            scores = np.concatenate(self.scores)[self.score_from - self.cached : -1]
            self.job.prompt_logprobs = scores.tolist()


class JaxEngine:
    """Serves a `Qwen2` from KV slots; implements `base.Engine` and `stepwise.StepEngine`."""

    def __init__(self, model: Qwen2, *, slots: int, max_length: int, policy_version: int = 0, mesh: Mesh | None = None):
        """Allocate the cache.

        Args:
            model: Architecture, compute dtype (also the cache's) and first weights.
            slots: Sessions with a cache; more requests than slots run in waves.
            max_length: Prompt + completion tokens of a session.
            policy_version: Version of the first weights.
            mesh: Where the model's weights lie; the cache then has slots over `data` and `fsdp`, heads over `tensor`.
        """
        if slots < 1 or max_length < 2:
            raise EngineError(f"slots {slots} and max_length {max_length}: at least 1 slot and 2 tokens are needed")
        if mesh is not None and slots % batch_shards(mesh):
            raise EngineError(f"{slots} slots: a multiple of data × fsdp = {batch_shards(mesh)} is allowed")
        self.max_length = max_length
        self._config, self._dtype = model.config, model.dtype
        self._graphdef, own = nnx.split(model)
        self._structure, self._shapes = jax.tree.structure(own), _shapes(own)
        self._table = SlotTable(slots, max_length)
        self._seats: dict[int, _Seat] = {}
        self._extend_tokens = EXTEND_TOKENS_CPU if jax.default_backend() == "cpu" else EXTEND_TOKENS
        self._mesh = mesh
        self._place = None if mesh is None else NamedSharding(mesh, spec("batch", "kv_heads"))
        self._cache, self._hidden = self._empty_cache()
        self.load(own, policy_version)

    @property
    def free_slots(self) -> int:
        """How many more jobs can be admitted."""
        return self._table.free

    def load(self, params: Any, policy_version: int) -> None:
        """Serve these weights (the state of `nnx.split(model)`) and drop every cache that no running job uses.

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
        self.flush()

    def release_memory(self, parts: Collection[MemoryPart] = MEMORY_PARTS) -> None:
        """Give device memory back: weights until the next `load`, the cache until the next job.

        Raises:
            EngineError: jobs hold slots.
        """
        if self._seats:
            raise EngineError(f"{len(self._seats)} requests run; memory can be given back when none does")
        if "kv_cache" in parts:
            self.flush()
            self._cache = self._hidden = None
        if "weights" in parts:
            self._params = None

    def checksums(self) -> dict[str, str]:
        """SHA-256 (64 bits of it) of every served tensor by its Hugging Face name; may be called by any thread."""
        if (params := self._params) is None:
            raise EngineError("the weights were given back")
        tensors = {name: np.ascontiguousarray(variable[...]) for name, variable in named(params).items()}
        return {name: hashlib.sha256(value.view(np.uint8).data).hexdigest()[:16] for name, value in tensors.items()}

    def close(self) -> None:
        """Nothing to release."""

    def release(self, session: str) -> None:
        """Forget a session's cache; unknown sessions are ignored."""
        self._table.release(session)

    def flush(self) -> None:
        """Forget every cached prefix; admitted jobs keep theirs."""
        self._table.clear()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one completion per request, in the order of the requests.

        Raises:
            EngineError: a prompt that does not fit, an unknown token id, an impossible sampling setting or a session
                that occurs twice. Nothing has run then.
        """
        for request in requests:
            self.check(request)
            if request.sampling.max_tokens < 1:
                raise EngineError(f"session {request.session!r}: {request.sampling}; max_tokens ≥ 1 is allowed")
        sessions = [request.session for request in requests]
        if len(set(sessions)) < len(sessions):
            raise EngineError("a session occurs twice in one call of generate; one request per session is allowed")
        jobs = [Job(request) for request in requests]
        try:
            for wave in self._table.waves(sessions):
                self.admit([jobs[index] for index in wave])
                self.decode()
        finally:
            for slot in [slot for slot, seat in self._seats.items() if seat.job in jobs]:  # it did not end well
                self._leave(slot, keep=False)
        return [self._completion(job) for job in jobs]

    def check(self, request: Request) -> None:
        """Raise EngineError for a request that can never be served."""
        prompt, sampling, where = request.prompt_ids, request.sampling, f"session {request.session!r}"
        if self._params is None:
            raise EngineError(f"{where}: the weights were given back; new ones must be loaded first")
        longest = self.max_length - min(sampling.max_tokens, 1)
        if not 1 <= len(prompt) <= longest:
            raise EngineError(f"{where}: prompt of {len(prompt)} tokens; 1 to {longest} are allowed")
        vocab = self._config.vocab_size
        if prompt.min() < 0 or prompt.max() >= vocab:
            raise EngineError(f"{where}: token ids {prompt.min()} to {prompt.max()}; 0 to {vocab - 1} are allowed")
        if sampling.max_tokens < 0 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            raise EngineError(f"{where}: {sampling}; max_tokens ≥ 0, temperature ≥ 0 and 0 < top_p ≤ 1 are allowed")
        if len(sampling.stop_ids) > MAX_STOP_IDS:
            raise EngineError(f"{where}: {len(sampling.stop_ids)} stop ids; at most {MAX_STOP_IDS} are allowed")
        if sampling.banned_from is not None and sampling.banned_from < 1:
            raise EngineError(f"{where}: banned_from {sampling.banned_from} bans every token; at least 1 is allowed")

    def admit(self, jobs: Sequence[Job]) -> None:
        """Compute the prompts of jobs that passed `check`, at most `free_slots`, together.

        A job that sampled before it was withdrawn goes on where it was. One that wants no token is finished then.
        """
        if not jobs:
            return
        if self._cache is None:
            self._cache, self._hidden = self._empty_cache()
        prompts = [_Prefill(job, job.known_ids) for job in jobs]
        placements = self._table.place(
            [job.request.session for job in jobs],
            [prompt.ids for prompt in prompts],
            [prompt.reusable for prompt in prompts],
        )
        for job, prompt, placement in zip(jobs, prompts, placements, strict=True):
            prompt.slot, prompt.cached, prompt.done = placement.slot, placement.cached, placement.cached
            self._seats[prompt.slot] = _Seat(job, self.policy_version)
        self._prefill(prompts, placements)
        for job, prompt in zip(jobs, prompts, strict=True):
            prompt.keep_scores()
            self._table.hold(prompt.slot, prompt.ids)
            if not job.ids:
                job.cached_tokens = prompt.cached
            if job.request.sampling.max_tokens == len(job.ids):
                job.finish = "length"
                self._leave(prompt.slot)

    def decode(self, burst: int | None = None) -> None:
        """Sample up to `burst` tokens (default: all) for every admitted job; those that end get their `finish`."""
        if not self._seats:
            return
        lengths, last, sampling = self._slot_arrays(burst or self.max_length)
        width = _width(int(np.max(lengths + sampling.limits + (last >= 0))), self.max_length)
        self._cache, *sampled = decode(
            self._graphdef, self._params, self._cache, self._hidden, lengths, last, sampling, width, self._place
        )
        ids, logprobs, counts = (np.asarray(part) for part in sampled)
        for slot, seat in list(self._seats.items()):
            self._take(slot, seat, ids[slot, : counts[slot]].tolist(), logprobs[slot, : counts[slot]].tolist())

    def withdraw(self, job: Job) -> None:
        """Take an unfinished job out of its slot; what the cache holds of it can be reused."""
        for slot in [slot for slot, seat in self._seats.items() if seat.job is job]:
            self._leave(slot)

    def _empty_cache(self) -> tuple[Any, Any]:
        """KV of all slots, and the last hidden state of each; made where they lie, as one device may lack the room."""
        sizes, hidden = (len(self._table), self.max_length, self._dtype), (len(self._table), self._config.hidden_size)
        make = lambda: (init_cache(self._config, *sizes), jnp.zeros(hidden, self._dtype))  # noqa: E731
        if self._mesh is None:
            return make()
        return jax.jit(make, out_shardings=(self._place, NamedSharding(self._mesh, PartitionSpec())))()

    def _take(self, slot: int, seat: _Seat, ids: list[int], logprobs: list[float]) -> None:
        """Hand sampled tokens to their job."""
        job, sampling = seat.job, seat.job.request.sampling
        seat.fresh = False
        if not job.spans or job.spans[-1][0] != self.policy_version:
            job.spans.append((self.policy_version, len(job.ids)))
        job.ids += ids
        job.logprobs += logprobs
        if job.ids[-1] in sampling.stop_ids:
            job.finish = "stop"
        elif len(job.ids) >= self._most_tokens(job):
            job.finish = "length"
        if job.finish:
            self._leave(slot)

    def _leave(self, slot: int, keep: bool = True) -> None:
        """End a job's stay in its slot; KV of older weights, or of unknown state, is not kept."""
        seat = self._seats.pop(slot)
        valid = seat.job.known_ids
        if not seat.fresh:
            valid = valid[:-1]  # the last token sampled has no KV yet
        keep = keep and seat.policy_version == self.policy_version
        self._table.commit(slot, valid if keep else valid[:0])

    def _completion(self, job: Job) -> Completion:
        return Completion(
            ids=np.asarray(job.ids, np.int32),
            logprobs=np.asarray(job.logprobs, np.float32),
            stopped=job.finish == "stop",
            cached_tokens=job.cached_tokens,
            policy_version=self.policy_version,
        )

    def _most_tokens(self, job: Job) -> int:
        """Tokens a job may sample in all."""
        return min(job.request.sampling.max_tokens, self.max_length - len(job.request.prompt_ids))

    def _prefill(self, prompts: Sequence[_Prefill], placements: Sequence[Placement]) -> None:
        """Copy and compute every prompt, stage by stage; leaves the last hidden state of each in its slot's row."""
        for stage in range(max(placement.stage for placement in placements) + 1):
            members = [index for index, placement in enumerate(placements) if placement.stage == stage]
            self._copy_prefixes([placements[index] for index in members])
            pending = [prompts[index] for index in members]
            while pending:
                for (bucket, width, _), group in _group(pending, self.max_length).items():
                    rows = min(len(self._table), max(1, self._extend_tokens // bucket))
                    for start in range(0, len(group), rows):
                        self._extend_rows(group[start : start + rows], rows, bucket, width)
                pending = [prompt for prompt in pending if prompt.left]

    def _copy_prefixes(self, placements: Sequence[Placement]) -> None:
        pairs = [(placement.source, placement.slot) for placement in placements if placement.source is not None]
        if pairs:
            padded = np.zeros((len(self._table), 2), np.int32)
            padded[: len(pairs)] = pairs
            self._cache = copy_slots(self._cache, padded, np.int32(len(pairs)), self._place)

    def _extend_rows(self, prompts: Sequence[_Prefill], rows: int, bucket: int, width: int) -> None:
        """Compute the next `bucket` tokens of some prompts, all scored or none."""
        slots = np.full(rows, len(self._table), np.int32)  # beyond the cache: reads are clipped, writes dropped
        token_ids = np.zeros((rows, bucket), np.int32)
        lengths, counts, targets = np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.zeros_like(token_ids)
        for row, prompt in enumerate(prompts):
            piece = prompt.ids[prompt.done : prompt.done + bucket]
            following = prompt.ids[prompt.done + 1 : prompt.done + 1 + bucket]
            slots[row], lengths[row], counts[row] = prompt.slot, prompt.done, len(piece)
            token_ids[row, : len(piece)], targets[row, : len(following)] = piece, following
        scored = prompts[0].score_from is not None
        self._hidden, self._cache, scores = extend(
            self._graphdef,
            self._params,
            self._cache,
            self._hidden,
            slots,
            token_ids,
            lengths,
            counts,
            targets if scored else None,
            width=width,
            place=self._place,
        )
        for row, prompt in enumerate(prompts):
            if scored:
                prompt.scores.append(np.asarray(scores)[row, : counts[row]])
            prompt.done += int(counts[row])

    def _slot_arrays(self, burst: int) -> tuple[Int32[np.ndarray, " S"], Int32[np.ndarray, " S"], SlotSampling]:
        """Tokens in the cache, last token outside of it and sampling of every slot, for one burst."""
        count = len(self._table)
        lengths, last = np.zeros(count, np.int32), np.full(count, -1, np.int32)
        sampling = SlotSampling(
            keys=np.zeros((count, 2), np.uint32),
            temperature=np.zeros(count, np.float32),
            top_p=np.ones(count, np.float32),
            banned_from=np.full(count, self._config.vocab_size, np.int32),
            stop_ids=np.full((count, MAX_STOP_IDS), -1, np.int32),
            limits=np.zeros(count, np.int32),
        )
        for slot, seat in self._seats.items():
            job, wanted = seat.job, seat.job.request.sampling
            lengths[slot] = len(job.request.prompt_ids) + len(job.ids)
            if not seat.fresh:
                lengths[slot], last[slot] = lengths[slot] - 1, job.ids[-1]
            sampling.keys[slot], sampling.temperature[slot] = job.request.key, wanted.temperature
            sampling.top_p[slot] = wanted.top_p
            if wanted.banned_from is not None:
                sampling.banned_from[slot] = wanted.banned_from
            sampling.stop_ids[slot, : len(wanted.stop_ids)] = wanted.stop_ids
            sampling.limits[slot] = min(self._most_tokens(job) - len(job.ids), burst)
        return lengths, last, sampling


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


def _group(pending: Sequence[_Prefill], max_length: int) -> dict[tuple[int, int, bool], list[_Prefill]]:
    """Prompts by the (bucket, width, scored) of their next chunk; all depend on the row alone."""
    groups: dict[tuple[int, int, bool], list[_Prefill]] = {}
    for prompt in pending:
        bucket = _bucket(prompt.left)
        width = _width(min(prompt.done + bucket, len(prompt.ids)), max_length)
        groups.setdefault((bucket, width, prompt.score_from is not None), []).append(prompt)
    return groups
