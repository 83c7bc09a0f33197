"""The engine taken apart into steps, for whoever batches requests that come and go: `Job` and `StepEngine`.

`Engine.generate` answers a whole batch; a server admits jobs when a slot is free and decodes all running ones in
bursts. Both are the same mechanism. A job keeps what it has sampled, so it can leave its slot and come back later, also
under other weights: its noise depends on (request key, position) alone.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from empo2_jax.rollout.base import MemoryPart, Request

MAX_STOP_IDS = 8  # of a request
Finish = Literal["stop", "length", "abort"]


@dataclass(eq=False)
class Job:
    """A request on its way through an engine, with what it has so far."""

    request: Request  # without a session name its cache can be reused by any later request
    score_from: int | None = None  # prompt tokens after this index get log-probabilities
    ids: list[int] = field(default_factory=list)  # sampled
    logprobs: list[float] = field(default_factory=list)  # of `ids`, nats, f32 values
    prompt_logprobs: list[float] | None = None  # of prompt tokens score_from + 1 and on, at temperature 1
    spans: list[tuple[int, int]] = field(default_factory=list)  # (policy version, index of its first id)
    cached_tokens: int = 0  # prompt tokens served from the KV cache when it was first admitted
    finish: Finish | None = None

    @property
    def known_ids(self) -> Int32[np.ndarray, " _"]:
        """Prompt and sampled ids."""
        return np.concatenate([self.request.prompt_ids, np.asarray(self.ids, np.int32)])


@runtime_checkable
class StepEngine(Protocol):
    """What continuous batching needs of an engine; called by one thread."""

    policy_version: int
    max_length: int

    @property
    def free_slots(self) -> int:
        """How many more jobs can be admitted."""
        ...

    def check(self, request: Request) -> None:
        """Raise EngineError for a request that can never be served; may be called by any thread."""
        ...

    def admit(self, jobs: Sequence[Job]) -> None:
        """Compute the prompts of at most `free_slots` jobs together; jobs that want no token are finished then."""
        ...

    def decode(self, burst: int | None = None) -> None:
        """Sample up to `burst` tokens (default: all) for every admitted job; those that end get their `finish`."""
        ...

    def withdraw(self, job: Job) -> None:
        """Take an unfinished job out of its slot."""
        ...

    def flush(self) -> None:
        """Forget every cached prefix; admitted jobs keep theirs."""
        ...

    def load(self, params: Any, policy_version: int) -> None:
        """Serve these weights from now on; no later admission reuses KV of older ones."""
        ...

    def release_memory(self, parts: Collection[MemoryPart]) -> None:
        """Give device memory back while no job is admitted: weights until `load`, caches until the next job."""
        ...
