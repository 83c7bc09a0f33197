"""New weights into running servers, and the proof that they serve them.

A server accepts much in silence: names it does not know, a transposed kernel, a load that did nothing. So a load is
(wake who gave memory back →) pause all → update all → read back (prefix cache flushed, version, checksums) → continue
all, whatever happened → the canary: log-probs of a fixed prompt against the trainer's own. Continuing comes before the
canary because a paused server holds every request back, scoring too; until it is over no episode is sent there
(`sglang_pool`).

Whether the folder itself is sound is checked before any of this, by whoever made it (`Validate`).
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from empo2_jax.errors import EngineError
from empo2_jax.rollout.chat import TokenIds
from empo2_jax.rollout.sglang_client import PauseMode, SglangServer
from empo2_jax.rollout.sglang_replies import Lost, Refused, Stale

RESTING = "/resting"  # end of the label of a server that gave its memory back
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
    checksums: dict[str, str] = field(default_factory=dict)  # of the parameters, by kind of server (`_kind`)


async def install(
    servers: Sequence[SglangServer], bundle: Bundle, mode: PauseMode, checksums: Mapping[str, str] | None = None
) -> Outcome:
    """Bring `bundle` into all `servers`; a failure of one leaves the others alone.

    Args:
        servers: Where to; none of them may be loading already.
        bundle: A folder that was validated.
        mode: What happens to running requests.
        checksums: Of servers that already serve the bundle.
    """
    outcome = Outcome(checksums=dict(checksums or {}))

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
    sums: dict[SglangServer, Any] = {}
    await each(wake)
    try:
        paused = await each(lambda server: server.pause(mode))
        await each(lambda server: server.update_weights(bundle.folder, bundle.label))
        await each(_flush)
        await each(lambda server: _check_version(server, bundle.label))
        sums = await each(SglangServer.checksums)
    finally:
        await asyncio.gather(*(_resume(server, outcome) for server in paused))
    await each(lambda server: check_canary(server, bundle, outcome))
    # Last, among those that passed: of two servers one that kept its old weights must not outvote the other.
    _compare({server: found for server, found in sums.items() if server not in outcome.failures}, outcome)
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


async def serves(server: SglangServer, bundle: Bundle) -> bool:
    """Whether a server, as it is, serves `bundle`."""
    if await server.version() != bundle.label:
        return False
    try:
        await check_canary(server, bundle, Outcome())
    except Stale:
        return False
    return True


async def rest(server: SglangServer, label: str) -> None:
    """Let a server that serves `label` give its memory back.

    The label says so from then on: who comes later, a restarted trainer too, can tell a server that must be woken from
    one that was started anew. A real server dies when it is asked while requests run, or twice.
    """
    await _flush(server)  # refused while requests run
    await server.relabel(label + RESTING)
    await server.release_memory()


async def wake(server: SglangServer) -> None:
    """Let a server take the memory again that it gave back; its weights are anything until the next load."""
    if (await server.version()).endswith(RESTING):
        await server.resume_memory()


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
    """Servers of a kind with the same weights have the same checksums; where they differ the majority is right."""
    texts = {server: (_kind(sums), _text(sums)) for server, sums in found.items() if sums is not None}
    for kind, text in [pair for pair, _ in Counter(texts.values()).most_common()]:
        outcome.checksums.setdefault(kind, text)
    for server, (kind, text) in texts.items():
        if text != outcome.checksums[kind]:
            error = Stale(f"{server.url}: other checksums of its parameters than the other servers")
            outcome.failures.setdefault(server, error)


def _kind(sums: Any) -> str:
    """The checksums without their values: servers are comparable where they name the same tensors and ranks."""
    if isinstance(sums, dict):
        return "{" + ",".join(f"{name}:{_kind(value)}" for name, value in sorted(sums.items())) + "}"
    return f"[{','.join(map(_kind, sums))}]" if isinstance(sums, list) else ""


def _text(sums: dict[str, Any]) -> str:
    return json.dumps(sums, sort_keys=True)
