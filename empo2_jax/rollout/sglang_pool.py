"""Many servers as one: who is asked, how often, when, and who must be nursed first.

A session stays with the server that holds its prefix. A server that fails is taken out at once, its requests go to the
others, and a task of its own (`_nurse`) brings it back: it waits until the server answers, loads the current weights
where they are not there, and lets it in after the canary alone. Every wait has a bound; back-off jitter is a function
of (seed, who, attempt). Only the event loop's thread may call this; `sglang` is the door from outside.
"""

import asyncio
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from empo2_jax.errors import ConfigError, Empo2Error, EngineError
from empo2_jax.randomness import uniform
from empo2_jax.rollout.base import Completion, Request
from empo2_jax.rollout.sglang_client import SglangServer
from empo2_jax.rollout.sglang_replies import Busy, Denied, Lost, Reply, ServerFault, Stale, Unspeakable
from empo2_jax.rollout.weights import Bundle, Outcome, Validate, check_canary, install

MAX_RELOADS = 2  # of one version into one server that failed with it
MAX_DELAY_S = 30.0
SPARE_TOKENS = 8  # that SGLang keeps free of the context it has
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolSettings:
    """How patient the pool is."""

    in_flight: int = 64  # requests at a time and server
    attempts: int = 5  # of one request
    backoff_s: float = 1.0  # before the second attempt; doubles
    recovery_s: float = 300.0  # without any server
    mixed_versions: bool = False  # whether one episode may be sampled by several versions
    seed: int = 0


@dataclass(eq=False)
class Member:
    """A server and what the pool knows of it."""

    server: SglangServer
    gate: asyncio.Semaphore
    ready: bool = False
    reason: str = "was not asked yet"  # why it is not ready
    load: int = 0  # requests sent to it or waiting for its gate
    doubts: int = 0  # how often its weights were in doubt; what it was asked before is then not believed
    nurse: asyncio.Task[None] | None = field(default=None, repr=False)


class ServerPool:
    """Completions from whichever server is ready, all serving one version."""

    def __init__(
        self,
        servers: Sequence[SglangServer],
        settings: PoolSettings,
        *,
        vocab_size: int,
        max_length: int,
        validate: Validate,
        router: SglangServer | None = None,
    ):
        self.counts: Counter[str] = Counter()  # of what went wrong, and of tokens
        self.current: Bundle | None = None
        self.gaps: dict[str, float] = {}  # canary by URL, nats
        self._settings, self._validate = settings, validate
        self._vocab_size, self._max_length = vocab_size, max_length
        self._members = [Member(server, asyncio.Semaphore(settings.in_flight)) for server in servers]
        self._router = None
        if router is not None:
            self._router = Member(router, asyncio.Semaphore(settings.in_flight * len(servers)), ready=True)
        self._last_good: Bundle | None = None  # before `current`
        self._checksums: str | None = None  # of `current`
        self._versions: dict[str, int] = {}  # by label
        self._sessions: dict[str, tuple[Member, int]] = {}  # who holds its prefix, under which version it began
        self._open, self._some_ready = asyncio.Event(), asyncio.Event()
        self._open.set()  # but while a load goes on
        self._alone_since = time.monotonic()  # when the last ready server went
        self._rids = (f"{os.getpid():x}-{time.time_ns():x}-{count}" for count in itertools.count())
        self._errands: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End every task and connection."""
        await _stop([member.nurse for member in self._members if member.nurse])
        await _stop(self._errands)
        for member in [*self._members, *([self._router] if self._router else [])]:
            await member.server.close()

    def release(self, session: str) -> None:
        """Forget who holds a session's prefix."""
        self._sessions.pop(session, None)

    @property
    def ready(self) -> list[SglangServer]:
        """Servers that take requests."""
        return [member.server for member in self._members if member.ready]

    async def load(self, bundle: Bundle) -> None:
        """Serve `bundle` from now on.

        A server that cannot is left out and nursed. If none took it over although they answered, they are given their
        last good version again and the bundle is refused.

        Raises:
            Empo2Error: the folder is not valid, a key is wrong, or no server serves the bundle in time.
        """
        await asyncio.to_thread(self._validate, bundle.folder)
        self._open.clear()
        try:
            await _stop([member.nurse for member in self._members if member.nurse])
            self._alone_since = time.monotonic()
            up = await self._answering()
            if self.current is None:
                await asyncio.gather(*(self._check_room(member.server) for member in up))
            outcome = await self._install(up, bundle)
            denied = [error for error in outcome.failures.values() if isinstance(error, Denied)]
            if denied:
                raise denied[0]
            good = [member for member in up if member.server not in outcome.failures]
            unsound = [member for member in up if not isinstance(outcome.failures.get(member.server, Lost()), Lost)]
            if unsound and not good:
                reason = outcome.failures[unsound[0].server]
                await self._go_back(unsound, reason)
                raise EngineError(f"no server took version {bundle.version} over: {reason}")
            self._last_good, self.current, self._checksums = self.current, bundle, outcome.checksums
            self._versions[bundle.label] = bundle.version
            for member in self._members:
                if member in good:
                    self._admit(member)
                else:
                    self._take_out(member, outcome.failures.get(member.server), unsound=member in unsound)
        finally:
            self._open.set()
        await self._wait_ready()

    async def complete(self, request: Request) -> Completion | EngineError:
        """Sample one completion, on another server if need be; what failed for good is returned, not raised."""
        fault: EngineError | None = None
        key = int(request.key[0]) << 32 | int(request.key[1])  # the same after a fault, so that the draw is too
        for attempt in range(self._settings.attempts):
            if fault is not None:
                self.counts["retries"] += 1
                wait_s = fault.wait_s if isinstance(fault, Busy) else 0.0
                await asyncio.sleep(max(min(wait_s, MAX_DELAY_S), self._delay_s(request.session, attempt - 1)))
            try:
                return await self._attempt(request, key)
            except (ServerFault, Busy) as error:
                fault = error
                key = (key + isinstance(fault, Unspeakable)) % 2**64
            except EngineError as error:
                return error
        self.counts["given_up"] += 1
        return EngineError(f"session {request.session!r}: {self._settings.attempts} attempts failed, the last: {fault}")

    async def _attempt(self, request: Request, key: int) -> Completion:
        member = await self._acquire(request.session)
        doubts, rid, sampling = member.doubts, next(self._rids), request.sampling
        limit = self._vocab_size if sampling.banned_from is None else min(sampling.banned_from, self._vocab_size)
        try:
            reply = await member.server.generate(rid, request.prompt_ids, sampling, key, limit)
            if member.doubts != doubts:
                raise Busy(f"{member.server.url}: its weights came into doubt while it answered")
            return self._accept(request, reply, member)
        except asyncio.CancelledError:
            self._errand(member.server.abort(rid))
            raise
        except ServerFault as fault:
            if isinstance(fault, Lost):
                self._errand(member.server.abort(rid))
            if member is self._router:
                self._errand(self._audit())
            elif member.ready:
                self._take_out(member, fault)
            raise
        finally:
            member.load -= 1
            member.gate.release()

    async def _acquire(self, session: str) -> Member:
        """A ready server with room, the session's own if it is one of them. Counted as load until released."""
        while True:
            if self.current is None:
                raise EngineError("no weights were loaded into the rollout servers yet")
            await self._open.wait()
            await self._wait_ready()
            member = self._choose(session)
            member.load += 1
            try:
                await member.gate.acquire()
            except asyncio.CancelledError:
                member.load -= 1
                raise
            if member.ready and self._open.is_set():
                return member
            member.load -= 1
            member.gate.release()

    def _choose(self, session: str) -> Member:
        assert self.current is not None
        own, version = self._sessions.get(session, (None, self.current.version))
        if version != self.current.version and not self._settings.mixed_versions:
            raise EngineError(
                f"session {session!r} began under version {version} and version {self.current.version} is served; "
                "rollout.mixed_versions = true would let it go on"
            )
        ready = [member for member in self._members if member.ready]
        best = self._router or (own if own in ready else min(ready, key=lambda member: member.load))
        if own is not None and best is not own:
            self.counts["rerouted"] += 1
        self._sessions[session] = (best, version)
        return best

    def _accept(self, request: Request, reply: Reply, member: Member) -> Completion:
        """The completion, if it was sampled by weights that it may be sampled by."""
        assert self.current is not None
        labels = {span.label for span in reply.spans}
        allowed = set(self._versions) if self._settings.mixed_versions else {self.current.label}
        if not labels <= allowed:
            self.counts["stale"] += 1
            raise Stale(
                f"{member.server.url}: sampled with weights {min(labels - allowed)!r}, not {self.current.label!r}"
            )
        spans = tuple((self._versions[span.label], span.start, span.end) for span in reply.spans)
        self.counts["prompt_tokens"] += len(request.prompt_ids)
        self.counts["cached_tokens"] += reply.cached_tokens
        return Completion(
            ids=reply.ids,
            logprobs=reply.logprobs,
            stopped=reply.stopped,
            cached_tokens=reply.cached_tokens,
            policy_version=spans[-1][0],
            version_spans=spans,
        )

    async def _wait_ready(self) -> None:
        """Until a server is ready, or `recovery_s` after the last one went."""
        left = self._alone_since + self._settings.recovery_s - time.monotonic()
        try:
            async with asyncio.timeout(None if self._some_ready.is_set() else max(left, 0.0)):
                await self._some_ready.wait()
        except TimeoutError:
            raise self._nobody() from None

    def _nobody(self) -> EngineError:
        reasons = "; ".join(f"{member.server.url} {member.reason}" for member in self._members)
        return EngineError(f"no rollout server is ready within {self._settings.recovery_s:g} s: {reasons}")

    async def _answering(self) -> list[Member]:
        """Members that answer now; waits up to `recovery_s` for one."""
        deadline = time.monotonic() + self._settings.recovery_s
        for attempt in itertools.count():
            answers = await asyncio.gather(*(member.server.ready() for member in self._members))
            if any(answers):
                return [member for member, answer in zip(self._members, answers, strict=True) if answer]
            for member in self._members:
                member.reason = "does not answer"
            delay_s = self._delay_s("start", attempt)
            if time.monotonic() + delay_s > deadline:
                break
            await asyncio.sleep(delay_s)
        raise self._nobody()

    async def _check_room(self, server: SglangServer) -> None:
        room = (await server.info()).get("max_req_input_len")
        if isinstance(room, int) and room + SPARE_TOKENS < self._max_length:
            raise ConfigError(
                f"{server.url}: takes prompts of at most {room} tokens, episodes with their tip have up to "
                f"{self._max_length}: lower rollout.max_length or start the server with more room"
            )

    def _admit(self, member: Member) -> None:
        if not member.ready:
            _log.info("%s is ready", member.server.url)
        member.ready, member.reason = True, ""
        self._some_ready.set()

    def _take_out(self, member: Member, error: EngineError | None, *, unsound: bool = False) -> None:
        """Send no more requests to it and begin to nurse it; `unsound`: its weights may be anything."""
        if member.ready:
            self.counts["taken_out"] += 1
        member.ready, member.reason = False, f"was taken out: {error}" if error else "does not answer"
        unsound = unsound or isinstance(error, Stale)
        member.doubts += unsound
        _log.warning("%s %s", member.server.url, member.reason)
        if not any(other.ready for other in self._members) and self._some_ready.is_set():
            self._alone_since = time.monotonic()
            self._some_ready.clear()
        if self.current is not None and (member.nurse is None or member.nurse.done()):
            member.nurse = asyncio.create_task(self._nurse(member, unsound))

    async def _nurse(self, member: Member, unsound: bool) -> None:
        """Bring a member back; gives up on this version after `MAX_RELOADS` loads that failed."""
        failed = 0
        for attempt in itertools.count():
            await asyncio.sleep(self._delay_s(member.server.url, attempt))
            try:
                if not await member.server.ready():
                    continue
                if not unsound and await self._unharmed(member.server):
                    return self._admit(member)
            except EngineError as error:
                member.reason = f"is not back: {error}"
                continue
            try:
                await self._reload(member, unsound)
                return self._admit(member)
            except Empo2Error as error:
                member.reason = f"could not be brought back: {error}"
                unsound, failed = True, failed + 1
            if failed == MAX_RELOADS:
                return _log.warning("%s %s; it waits for the next version", member.server.url, member.reason)

    async def _unharmed(self, server: SglangServer) -> bool:
        """Whether it still serves the current weights."""
        assert self.current is not None
        if await server.version() != self.current.label:
            return False
        try:
            await check_canary(server, self.current, Outcome())
        except Stale:
            return False
        return True

    async def _reload(self, member: Member, unsound: bool) -> None:
        """Load the current weights; where those it has are in doubt, first the ones that were good before."""
        bundle = self.current
        assert bundle is not None
        self.counts["reloads"] += 1
        await asyncio.to_thread(self._validate, bundle.folder)  # it may be the folder that broke the server
        if unsound and self._last_good is not None:
            await self._install([member], self._last_good)
        failures = (await self._install([member], bundle, self._checksums)).failures
        if failures:
            await self._quarantine(member)
            raise failures[member.server]

    async def _install(self, members: Sequence[Member], bundle: Bundle, checksums: str | None = None) -> Outcome:
        mode = "retract" if self._settings.mixed_versions else "abort"
        outcome = await install([member.server for member in members], bundle, mode, checksums)
        self.gaps |= {server.url: gap for server, gap in outcome.gaps.items()}
        return outcome

    async def _go_back(self, members: Sequence[Member], reason: EngineError) -> None:
        """Give servers the version that they served before; what fails again serves nothing."""
        failures = (await self._install(members, self.current)).failures if self.current else {}
        for member in members:
            if self.current is None or member.server in failures:
                await self._quarantine(member)
                self._take_out(member, failures.get(member.server, reason))

    async def _quarantine(self, member: Member) -> None:
        """Hold requests of others back too (a router's): these weights are nobody's."""
        try:
            await member.server.pause("abort")
        except EngineError as error:
            member.reason = str(error)

    async def _audit(self) -> None:
        """After a fault behind a router: which server is it?"""
        assert self.current is not None
        for member in [member for member in self._members if member.ready]:
            try:
                found = await member.server.version()
                if found != self.current.label:
                    raise Stale(f"{member.server.url}: reports weights {found!r}, not {self.current.label!r}")
            except EngineError as error:
                if member.ready:
                    self._take_out(member, error)

    def _delay_s(self, who: str, attempt: int) -> float:
        """Exponential back-off with jitter of ± a half."""
        longest = min(self._settings.backoff_s * 2.0 ** min(attempt, 16), MAX_DELAY_S)
        return longest * (0.5 + uniform(self._settings.seed, "backoff", who, attempt))

    def _errand(self, call: Coroutine[Any, Any, None]) -> None:
        """Do something nobody waits for; its failure tells nothing new."""

        async def run() -> None:
            with suppress(EngineError):
                await call

        task = asyncio.create_task(run())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)


async def _stop(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = [task for task in tasks if not task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
