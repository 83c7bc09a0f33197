"""An engine that answers from a script: for tests and for replaying recorded episodes without a model.

It keeps the contract of `base.Engine` (validation, stop tokens, limits, prefix accounting) but has no weights: every
token gets the same log-probability.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from empo2_jax.errors import EngineError
from empo2_jax.rollout.base import Completion, Request

Script = Callable[[Request], Sequence[int]]


class ReplayEngine:
    """Answers each request with `script(request)`, cut at the first stop id, at `max_tokens` and at the context."""

    def __init__(self, script: Script, *, max_length: int = 4096, logprob: float = -0.5, policy_version: int = 0):
        """Serve a script.

        Args:
            script: Token ids for a request; a pure function makes a reproducible engine.
            max_length: Prompt + completion tokens of a session.
            logprob: What every token reports, nats, at most 0.
            policy_version: Version reported until the first `load`.
        """
        self.policy_version = policy_version
        self.max_length = max_length
        self._script, self._logprob = script, logprob
        self._history: dict[str, Int32[np.ndarray, " tokens"]] = {}

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer the requests in order; the prefix shared with a session's last sequence counts as cached.

        Raises:
            EngineError: a prompt does not fit `max_length - 1`, or a session occurs twice.
        """
        sessions = [request.session for request in requests]
        if len(set(sessions)) < len(sessions):
            raise EngineError("a session occurs twice in one call of generate; one request per session is allowed")
        return [self._answer(request) for request in requests]

    def close(self) -> None:
        """Nothing to release."""

    def release(self, session: str) -> None:
        """Forget a session."""
        self._history.pop(session, None)

    def load(self, params: Any, policy_version: int) -> None:
        """Forget every session and report the new version; there are no weights."""
        self._history.clear()
        self.policy_version = policy_version

    def release_memory(self) -> None:
        """Nothing to give back."""

    def _answer(self, request: Request) -> Completion:
        prompt = request.prompt_ids
        room = min(request.sampling.max_tokens, self.max_length - len(prompt))
        if not len(prompt) or room < 1:
            raise EngineError(
                f"session {request.session!r}: prompt of {len(prompt)} tokens; 1 to {self.max_length - 1} are allowed"
            )
        ids = np.asarray(self._script(request), np.int32)[:room]
        stops = np.flatnonzero(np.isin(ids, request.sampling.stop_ids))
        if stops.size:
            ids = ids[: stops[0] + 1]
        past = self._history.get(request.session, prompt[:0])
        limit = min(len(past), len(prompt) - 1)
        differ = np.flatnonzero(past[:limit] != prompt[:limit])
        self._history[request.session] = np.concatenate([prompt, ids])
        return Completion(
            ids=ids,
            logprobs=np.full(len(ids), self._logprob, np.float32),
            stopped=bool(stops.size),
            cached_tokens=int(differ[0]) if differ.size else limit,
            policy_version=self.policy_version,
        )
