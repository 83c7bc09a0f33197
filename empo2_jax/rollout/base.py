"""The engine protocol: token ids in, sampled ids and their log-probabilities out.

A *session* names a sequence whose KV cache the engine should keep: the next prompt of the session shares a prefix
with the last one, and the engine recomputes only what differs. That one rule covers append-only histories,
roll-back of a tip block and the tip written after an episode. Sampling is a function of (request key, position), so
a result depends neither on the slot nor on the batch it ran in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32, UInt32

from empo2_jax.errors import EngineError

MemoryPart = Literal["kv_cache", "weights"]
MEMORY_PARTS: tuple[MemoryPart, ...] = ("kv_cache", "weights")


@dataclass(frozen=True)
class Sampling:
    """How to sample; log-probabilities are log-softmax(logits / temperature) over the full vocabulary.

    `temperature = 0` is greedy and reports temperature-1 values.
    """

    max_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    top_p: float = 1.0
    banned_from: int | None = None  # ids ≥ this are never sampled (rows of the embedding without a token)


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    session: str
    prompt_ids: Int32[np.ndarray, " prompt"]
    key: UInt32[np.ndarray, "2"]  # from `randomness.words`
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """Sampled ids (the stop token included when sampled) with the engine's log-probabilities, nats."""

    ids: Int32[np.ndarray, " A"]
    logprobs: Float32[np.ndarray, " A"]
    stopped: bool  # False: ran into max_tokens or the context
    cached_tokens: int  # prompt tokens served from the KV cache
    policy_version: int  # of the last token
    version_spans: tuple[
        tuple[int, int, int], ...
    ] = ()  # (version, first id, end) where an engine may change it midway

    @property
    def finish_reason(self) -> str:
        """Why sampling ended: `stop` or `length`."""
        return "stop" if self.stopped else "length"


@runtime_checkable
class Engine(Protocol):
    """Serves tokens for one policy version at a time."""

    policy_version: int
    max_length: int  # prompt + completion tokens of a session

    def generate(self, requests: Sequence[Request]) -> Sequence[Completion | EngineError]:
        """Sample one completion per request, in the order of the requests; one request per session at a time.

        The error of a request that failed alone stands in its place; `EngineError` is raised where none was served.
        """
        ...

    def release(self, session: str) -> None:
        """Forget a session's cache; unknown sessions are ignored."""
        ...

    def load(self, params: Any, policy_version: int) -> None:
        """Serve these weights from now on; every cached KV of older weights is dropped."""
        ...

    def release_memory(self) -> None:
        """Give the memory of weights and caches back until the next `load`; nothing can be sampled before it."""
        ...

    def close(self) -> None:
        """Release connections, threads and locks; safe to call twice."""
        ...


@runtime_checkable
class Measured(Protocol):
    """An engine that has something to report of an iteration."""

    def metrics(self) -> dict[str, float]:
        """Figures since the last call, by metric name."""
        ...
