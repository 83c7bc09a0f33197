"""New weights into running servers, and the proof that they serve them.

A server accepts much in silence: names it does not know, a transposed kernel, a load that did nothing. So a load is
pause all → update all → read back (prefix cache flushed, version, checksums) → continue all, whatever happened → the
canary: log-probs of a fixed prompt against the trainer's own. Continuing comes before the canary because a paused
server holds every request back, scoring too; until it is over no episode is sent there (`sglang_pool`).

Whether the folder itself is sound is checked before any of this, by whoever made it (`Validate`).
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from empo2_jax.errors import EngineError
from empo2_jax.rollout.chat import TokenIds
from empo2_jax.rollout.sglang_client import PauseMode, SglangServer
from empo2_jax.rollout.sglang_replies import Lost, Refused, Stale

Validate = Callable[[Path], object]  # raises an Empo2Error for a folder that must not be loaded


@runtime_checkable
class Publish(Protocol):
    """Writes parameters as folders that servers can read."""

    def __call__(self, params: Any, policy_version: int) -> Path:
        """The folder of a version, complete or not there at all."""
        ...

    def close(self) -> None:
        """No more versions will come."""
        ...


@dataclass(frozen=True)
class Canary:
    """A fixed prompt and what the trainer thinks of it."""

    ids: TokenIds
    logprobs: Float32[np.ndarray, " scored"]  # of all ids but the first, temperature 1, nats
    tolerance: float  # largest difference allowed, nats

    def gap(self, found: Float32[np.ndarray, " scored"]) -> float:
        """Largest difference, nats."""
        return float(np.abs(found - self.logprobs).max())


@dataclass(frozen=True)
class Bundle:
    """One version of the weights as a folder that servers can read."""

    folder: Path
    version: int
    label: str  # what servers report; never used for other weights
    canary: Canary


@dataclass
class Outcome:
    """What came of a load, server by server."""

    failures: dict[SglangServer, EngineError] = field(default_factory=dict)
    gaps: dict[SglangServer, float] = field(default_factory=dict)  # of the canary, nats
    checksums: str | None = None  # of the parameters, as one text; None where no server tells


async def install(
    servers: Sequence[SglangServer], bundle: Bundle, mode: PauseMode, checksums: str | None = None
) -> Outcome:
    """Bring `bundle` into all `servers`; a failure of one leaves the others alone.

    Args:
        servers: Where to; none of them may be loading already.
        bundle: A folder that was validated.
        mode: What happens to running requests.
        checksums: Of a server that already serves the bundle.
    """
    outcome = Outcome(checksums=checksums)

    async def each(call: Callable[[SglangServer], Awaitable[Any]]) -> dict[SglangServer, Any]:
        results: dict[SglangServer, Any] = {}

        async def one(server: SglangServer) -> None:
            try:
                results[server] = await call(server)
            except EngineError as error:
                outcome.failures.setdefault(server, error)

        await asyncio.gather(*(one(server) for server in servers if server not in outcome.failures))
        return results

    paused: dict[SglangServer, Any] = {}
    try:
        paused = await each(lambda server: server.pause(mode))
        await each(lambda server: server.update_weights(bundle.folder, bundle.label))
        await each(_flush)
        await each(lambda server: _check_version(server, bundle.label))
        _compare(await each(SglangServer.checksums), outcome)
    finally:
        await asyncio.gather(*(_resume(server, outcome) for server in paused))
    await each(lambda server: check_canary(server, bundle, outcome))
    return outcome


async def check_canary(server: SglangServer, bundle: Bundle, outcome: Outcome) -> None:
    """Ask for the log-probs of the canary; raises `Stale` when they are not the trainer's."""
    found, label = await server.score(bundle.canary.ids)
    gap = outcome.gaps[server] = bundle.canary.gap(found)
    if label != bundle.label:
        raise Stale(f"{server.url}: serves weights {label!r} after {bundle.label!r} was loaded")
    if not gap <= bundle.canary.tolerance:
        raise Stale(
            f"{server.url}: the canary differs by {gap:.1e} nats from the trainer, at most "
            f"{bundle.canary.tolerance:.0e} is allowed: version {bundle.version} was not loaded as it is"
        )


async def _flush(server: SglangServer) -> None:
    """Drop the prefix cache; requests that were just aborted may need a moment to go."""
    for wait_s in (0.1, 0.3, 1.0, 3.0):
        try:
            return await server.flush()
        except Refused:
            await asyncio.sleep(wait_s)
    await server.flush()


async def _check_version(server: SglangServer, label: str) -> None:
    found = await server.version()
    if found != label:
        raise Stale(f"{server.url}: reports weights {found!r} after {label!r} was loaded")


async def _resume(server: SglangServer, outcome: Outcome) -> None:
    """Continue a server that was paused, unless its connection broke."""
    if isinstance(outcome.failures.get(server), Lost):
        return
    try:
        await server.resume()
    except EngineError as error:
        outcome.failures.setdefault(server, error)


def _compare(found: dict[SglangServer, dict[str, Any] | None], outcome: Outcome) -> None:
    """Servers with the same weights have the same checksums; where they differ the majority is right."""
    texts = {server: _text(sums) for server, sums in found.items() if sums is not None}
    if not texts:
        return
    right = outcome.checksums or Counter(texts.values()).most_common(1)[0][0]
    outcome.checksums = right
    for server, text in texts.items():
        if text != right:
            error = Stale(f"{server.url}: other checksums of its parameters than the other servers")
            outcome.failures.setdefault(server, error)


def _text(sums: dict[str, Any]) -> str:
    return json.dumps(sums, sort_keys=True)
