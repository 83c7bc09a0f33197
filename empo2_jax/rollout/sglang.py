"""Rollouts from SGLang servers, or from `empo2 serve`, which speaks the same API: `base.Engine` over HTTP.

The pool lives in an event loop of a thread of its own, so that servers are nursed while the trainer computes. SGLang
draws from a generator of its own, not from the request's key (unless its deterministic inference is on): a run with it
does not resume bit for bit. Weights go through a folder that trainer and servers both see; how it is written, checked
and scored by the trainer is handed in, so that nothing here knows JAX.
"""

import asyncio
import atexit
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from statistics import fmean
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float32

from empo2_jax.errors import ConfigError, EngineError
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.rollout.base import Completion, Request
from empo2_jax.rollout.chat import TokenIds
from empo2_jax.rollout.sglang_client import Access, SglangServer
from empo2_jax.rollout.sglang_member import PoolSettings
from empo2_jax.rollout.sglang_pool import ServerPool
from empo2_jax.rollout.weights import Bundle, Canary, Publish, Validate

Result = TypeVar("Result")


@runtime_checkable
class Processes(Protocol):
    """The processes of a run, which call `load` and `metrics` together; `distributed.Gang` is one."""

    process: int
    size: int

    def first(self, call: Callable[[], Any], what: str) -> Any:
        """What `call` returns on the first process, which alone runs it."""
        ...

    def gather(self, call: Callable[[], bytes], what: str) -> list[bytes]:
        """What `call` returns on every process."""
        ...


SCRAPED = {
    "sglang:num_running_reqs": "engine/running",
    "sglang:num_queue_reqs": "engine/queued",
    "sglang:num_retracted_reqs": "engine/retracted",
    "sglang:cache_hit_rate": "engine/cache_hit_rate",
    "sglang:gen_throughput": "engine/tokens_per_s",
    "sglang:token_usage": "engine/cache_used",
}
COUNTED = ("retries", "rerouted", "taken_out", "reloads", "stale", "given_up")
SCRAPE_S = 1.0
MEANS = ("engine/cache_hit_rate", "engine/cache_used")  # over servers; the others are sums


class SglangEngine:
    """Servers at some URLs as one engine; implements `base.Engine` and `base.Measured`."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        access: Access,
        settings: PoolSettings,
        max_length: int,
        model: Qwen2Config,
        canary_ids: TokenIds,
        canary_tolerance: float,
        publish: Publish,
        score: Callable[[Any], Float32[np.ndarray, " scored"]],
        validate: Validate,
        processes: Processes,
        router: str = "",
    ):
        """Begin; nothing is asked of a server before the first `load`.

        Args:
            urls: Base URLs, each of one server; weights are loaded into all of them.
            access: Keys and deadlines.
            settings: Patience.
            max_length: Prompt + completion tokens of a session.
            model: Architecture of the policy; ids outside its vocabulary are refused before they are sent.
            canary_ids: Prompt of the canary, at least two ids.
            canary_tolerance: Nats by which server and trainer may differ on it.
            publish: Writes parameters as a folder for a version, complete or not at all.
            score: The trainer's log-probs of `canary_ids[1:]` under parameters, at temperature 1, nats.
            validate: Refuses a folder that must not be loaded.
            processes: Of the run; the first one alone loads and nurses, all sample.
            router: URL that completions go through instead.
        """
        if not urls:
            raise ConfigError("rollout.servers: no server; URLs, or a file with one a line, are needed")
        self.policy_version, self.max_length = 0, max_length
        self._access, self._vocab_size = access, model.vocab_size
        self._canary_ids, self._tolerance = canary_ids, canary_tolerance
        self._publish, self._score, self._processes = publish, score, processes
        self._load_seconds = 0.0
        self._calls: set[Future[Any]] = set()  # that threads wait for
        self._samples: list[dict[str, float]] = []  # scraped since the last `metrics`
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout servers", daemon=True)
        self._thread.start()
        self._pool = ServerPool(
            [SglangServer(url, access) for url in urls],
            settings,
            model=model,
            max_length=max_length,
            validate=validate,
            router=SglangServer(router, access) if router else None,
            process=processes.process,
            processes=processes.size,
        )
        atexit.register(self.close)

    def close(self) -> None:
        """Close every connection and give the weights' folder free; the servers go on. Calls of other threads end."""
        if self._loop.is_closed():
            return
        for call in list(self._calls):
            call.cancel()
        self._publish.close()
        atexit.unregister(self.close)
        self._run(self._pool.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, requests: Sequence[Request]) -> list[Completion | EngineError]:
        """Sample one completion per request, in their order, all at the same time as far as servers have room.

        Raises:
            EngineError: a request that cannot be served anywhere; nothing was sent then.
        """
        for request in requests:
            self._check(request)
        sessions = [request.session for request in requests]
        if len(set(sessions)) < len(sessions):
            raise EngineError("a session occurs twice in one call of generate; one request per session is allowed")
        return self._run(self._complete([self._fitted(request) for request in requests])) if requests else []

    def release(self, session: str) -> None:
        """Forget which server holds a session; its cache goes when the server needs the room."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pool.release, session)

    def load(self, params: Any, policy_version: int) -> None:
        """Publish parameters, bring them into every server, and believe it after the canary alone.

        Raises:
            Empo2Error: the folder cannot be written or is refused, or no server serves it.
        """
        began = time.monotonic()
        logprobs = self._score(params)
        folder = self._publish(params, policy_version)
        # Two runs, or a run that went back, may give one number to other weights: what they say tells them apart.
        label = f"{policy_version}-{hashlib.blake2b(logprobs.tobytes(), digest_size=6).hexdigest()}"
        canary = Canary(self._canary_ids, logprobs, self._tolerance)
        bundle = Bundle(folder, policy_version, label, canary)
        self._processes.first(lambda: self._run(self._pool.load(bundle)), "rollout servers")
        if self._processes.process:
            self._run(self._pool.follow(bundle))
        self.policy_version = policy_version
        self._load_seconds = time.monotonic() - began

    def metrics(self) -> dict[str, float]:
        """What the pool counted, and means of what the servers said while they worked, since the last call."""
        mine, self._pool.counts = self._pool.counts, Counter()
        parts = self._processes.gather(lambda: json.dumps(mine).encode(), "rollout figures")
        return self._run(self._metrics(sum((Counter(json.loads(part)) for part in parts), Counter())))

    def release_memory(self) -> None:
        """Let the servers give their memory back until the next `load`, for a trainer on the same chips."""
        self._run(self._pool.rest())

    def _run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Wait for something that the loop does; every part of it has its own deadline."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._calls.add(future)
        try:
            return future.result()
        finally:
            future.cancel()  # Ctrl-C: the servers are told to abort
            self._calls.discard(future)

    async def _complete(self, requests: Sequence[Request]) -> list[Completion | EngineError]:
        watch = asyncio.create_task(self._watch())
        try:
            return list(await asyncio.gather(*(self._pool.complete(request) for request in requests)))
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        """Scrape the servers while they work: what they say at the end of an iteration is that they are idle."""
        while True:
            await asyncio.sleep(SCRAPE_S)
            self._samples.append(_aggregate(await asyncio.gather(*map(_measured, self._pool.ready))))

    async def _metrics(self, counts: "Counter[str]") -> dict[str, float]:
        prompt, cached = counts.pop("prompt_tokens", 0), counts.pop("cached_tokens", 0)
        metrics = {f"engine/{name}": float(counts[name]) for name in COUNTED}
        metrics["engine/servers_ready"] = float(len(self._pool.ready))
        metrics["engine/load_s"] = self._load_seconds
        metrics["engine/cached_share"] = cached / max(prompt, 1)
        if self._pool.gaps:
            metrics["engine/canary_abs_diff_max"] = max(self._pool.gaps.values())
        samples, self._samples = self._samples, []
        for name in sorted({name for sample in samples for name in sample}):
            metrics[name] = fmean(sample[name] for sample in samples if name in sample)
        return metrics

    def _fitted(self, request: Request) -> Request:
        """A request that ends at the context: servers refuse what may go beyond it."""
        room = self.max_length - len(request.prompt_ids)
        return replace(request, sampling=replace(request.sampling, max_tokens=min(request.sampling.max_tokens, room)))

    def _check(self, request: Request) -> None:
        prompt, sampling, where = request.prompt_ids, request.sampling, f"session {request.session!r}"
        if not 1 <= len(prompt) < self.max_length:
            raise EngineError(f"{where}: prompt of {len(prompt)} tokens; 1 to {self.max_length - 1} are allowed")
        if prompt.min() < 0 or prompt.max() >= self._vocab_size:
            last = self._vocab_size - 1
            raise EngineError(f"{where}: token ids {prompt.min()} to {prompt.max()}; 0 to {last} are allowed")
        if sampling.max_tokens < 1 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            raise EngineError(f"{where}: {sampling}; max_tokens ≥ 1, temperature ≥ 0 and 0 < top_p ≤ 1 are allowed")


async def _measured(server: SglangServer) -> dict[str, float]:
    try:
        return await server.metrics()
    except EngineError:  # the next request will find out
        return {}


def _aggregate(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Our names of what servers measured, over all of them."""
    metrics: dict[str, float] = {}
    for name, ours in SCRAPED.items():
        values = [sample[name] for sample in samples if name in sample]
        if values:
            metrics[ours] = sum(values) / (len(values) if ours in MEANS else 1)
    return metrics
