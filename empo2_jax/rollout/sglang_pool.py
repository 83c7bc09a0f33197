"""Many servers as one: who is asked, how often, when, and who must be nursed first.

A session stays with the server that holds its prefix. A server that fails is taken out at once, its requests go to the
others, and a task of its own (`_nurse`) brings it back: it waits until the server answers, loads the current weights
where they are not there, and lets it in after the canary alone. Every wait has a bound; back-off jitter is a function
of (seed, who, attempt). Of several processes with the same servers the first one loads and nurses; the others follow:
they wait for a server to serve what the first one says. Only the event loop's thread may call this; `sglang` is the
door from outside.
"""

import asyncio
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from empo2_jax.errors import GUIDE, Empo2Error, EngineError
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.rollout.base import Completion, Request
from empo2_jax.rollout.sglang_client import SglangServer
from empo2_jax.rollout.sglang_member import MAX_DELAY_S, Member, PoolSettings, check_server, stop, unfit
from empo2_jax.rollout.sglang_replies import Busy, Denied, Lost, ServerFault, Stale, Unspeakable, accept
from empo2_jax.rollout.weights import Bundle, Outcome, Validate, install, rest, serves

PATROL_S = 2.0
MAX_RELOADS = 2  # of one version into one server that failed with it
_log = logging.getLogger(__name__)


class ServerPool:
    """Completions from whichever server is ready, all serving one version."""

    def __init__(
        self,
        servers: Sequence[SglangServer],
        settings: PoolSettings,
        *,
        model: Qwen2Config,
        max_length: int,
        validate: Validate,
        router: SglangServer | None = None,
        process: int = 0,
        processes: int = 1,
    ):
        self.counts: Counter[str] = Counter()  # of what went wrong, and of tokens
        self.current: Bundle | None = None
        self.gaps: dict[str, float] = {}  # canary by URL, nats
        self._settings, self._validate = settings, validate
        self._model, self._max_length = model, max_length
        self._members = [Member(server, asyncio.Semaphore(settings.in_flight)) for server in servers]
        self._router = None
        if router is not None:
            self._router = Member(router, asyncio.Semaphore(settings.in_flight * len(servers)), ready=True)
        self._last_good: Bundle | None = None  # before `current`
        self._checksums: dict[str, str] = {}  # of `current`
        self._resting = False  # the servers gave their memory back
        self._leads, self._shared = process == 0, processes > 1
        self._patrol: asyncio.Task[None] | None = None
        self._versions: dict[str, int] = {}  # by label
        self._sessions: dict[str, tuple[Member, int]] = {}  # who holds its prefix, under which version it began
        self._open, self._some_ready = asyncio.Event(), asyncio.Event()
        self._open.set()  # but while a load goes on
        self._alone_since = time.monotonic()  # when the last ready server went
        self._rids = (f"{os.getpid():x}-{time.time_ns():x}-{count}" for count in itertools.count())
        self._errands: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End every task and connection."""
        await stop([*self._nurses(), *self._errands, *([self._patrol] if self._patrol else [])])
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
        self._resting = False
        try:
            await stop(self._nurses())
            self._alone_since = time.monotonic()
            up = await self._answering()
            strange = await unfit(up, self._model, self._max_length)
            if strange and self.current is None:
                raise next(iter(strange.values()))
            up = [member for member in up if member not in strange]
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
                    reason = outcome.failures.get(member.server) or strange.get(member)
                    self._take_out(member, reason, unsound=member in unsound)
        finally:
            self._open.set()
        if self._shared and self._patrol is None:
            self._patrol = asyncio.create_task(self._watch())
        await self._wait_ready()

    async def follow(self, bundle: Bundle) -> None:
        """Serve `bundle`, which the first process has loaded.

        Raises:
            EngineError: no server serves it in time.
        """
        await stop(self._nurses())
        self._alone_since, self._resting = time.monotonic(), False
        self.current, self._versions[bundle.label] = bundle, bundle.version

        async def one(member: Member) -> None:
            try:
                fault = None if await serves(member.server, bundle) else Stale(f"{member.server.url}: other weights")
            except EngineError as error:
                fault = error
            self._take_out(member, fault) if fault else self._admit(member)

        await asyncio.gather(*map(one, self._members))
        await self._wait_ready()

    async def rest(self) -> None:
        """Let ready servers give their memory back until the next `load`; one that fails is left out until then."""
        self._resting = True
        await stop(self._nurses())

        async def one(member: Member) -> None:
            try:
                await rest(member.server, self.current.label if self.current else "")
            except EngineError as error:
                self._take_out(member, error)

        if self._leads:
            await asyncio.gather(*(one(member) for member in self._members if member.ready))

    async def complete(self, request: Request) -> Completion | EngineError:
        """Sample one completion, on another server if need be; what failed for good is returned, not raised."""
        fault: EngineError | None = None
        key = int(request.key[0]) << 32 | int(request.key[1])  # the same after a fault, so that the draw is too
        for attempt in range(self._settings.attempts):
            if fault is not None:
                self.counts["retries"] += 1
                wait_s = fault.wait_s if isinstance(fault, Busy) else 0.0
                await asyncio.sleep(max(min(wait_s, MAX_DELAY_S), self._settings.delay_s(request.session, attempt - 1)))
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
        limit = min(sampling.banned_from or self._model.vocab_size, self._model.vocab_size)
        try:
            reply = await member.server.generate(rid, request.prompt_ids, sampling, key, limit)
            if member.doubts != doubts:
                raise Busy(f"{member.server.url}: its weights came into doubt while it answered")
            assert self.current is not None
            mixed = self._settings.mixed_versions
            allowed = self._versions if mixed else {self.current.label: self.current.version}
            completion = accept(member.server.url, reply, allowed)
            self.counts["prompt_tokens"] += len(request.prompt_ids)
            self.counts["cached_tokens"] += reply.cached_tokens
            return completion
        except asyncio.CancelledError:
            self._errand(member.server.abort(rid))
            raise
        except ServerFault as fault:
            self.counts["stale"] += isinstance(fault, Stale)
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
            if self._resting:
                raise EngineError("the rollout servers gave their memory back; weights must be loaded first")
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
            delay_s = self._settings.delay_s("start", attempt)
            if time.monotonic() + delay_s > deadline:
                break
            await asyncio.sleep(delay_s)
        raise self._nobody()

    def _admit(self, member: Member) -> None:
        if not member.ready:
            _log.info("%s is ready", member.server.url)
        member.ready, member.reason = True, ""
        self._some_ready.set()

    def _take_out(self, member: Member, error: Empo2Error | None, *, unsound: bool = False) -> None:
        """Send no more requests to it and begin to nurse it; `unsound`: its weights may be anything."""
        if member.ready:
            self.counts["taken_out"] += 1
        member.ready, member.reason = False, f"was taken out: {error}" if error else "does not answer"
        unsound = unsound or isinstance(error, Stale)
        member.doubts += unsound
        _log.warning("%s %s; %sservers-that-are-taken-out", member.server.url, member.reason, GUIDE)
        if not any(other.ready for other in self._members) and self._some_ready.is_set():
            self._alone_since = time.monotonic()
            self._some_ready.clear()
        if self.current is not None and not self._resting and (member.nurse is None or member.nurse.done()):
            member.nurse = asyncio.create_task(self._nurse(member, unsound))

    async def _nurse(self, member: Member, unsound: bool) -> None:
        """Bring a member back; gives up on this version after `MAX_RELOADS` loads that failed."""
        failed = 0
        assert self.current is not None
        for attempt in itertools.count():
            await asyncio.sleep(self._settings.delay_s(member.server.url, attempt))
            try:
                if not await member.server.ready():
                    continue
                await check_server(member.server, self._model, self._max_length)
                if not (unsound and self._leads) and await serves(member.server, self.current):
                    return self._admit(member)
            except Empo2Error as error:
                if (reason := f"is not back: {error}") != member.reason:
                    _log.warning("%s %s; %sservers-that-are-taken-out", member.server.url, reason, GUIDE)
                member.reason = reason
                continue
            if not self._leads:
                member.reason = "has not got the weights from the first process yet"
                continue
            try:
                await self._reload(member, unsound)
                return self._admit(member)
            except Empo2Error as error:
                member.reason = f"could not be brought back: {error}"
                unsound, failed = True, failed + 1
            if failed == MAX_RELOADS:
                waits = "%s %s; it waits for the next version; %sservers-that-are-taken-out"
                return _log.warning(waits, member.server.url, member.reason, GUIDE)

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

    async def _install(
        self, members: Sequence[Member], bundle: Bundle, checksums: dict[str, str] | None = None
    ) -> Outcome:
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

    async def _watch(self) -> None:
        """Of several processes another one may notice a fault: ask every server once in a while."""
        while True:
            await asyncio.sleep(PATROL_S)
            if self._open.is_set() and not self._resting:
                await self._audit()

    async def _audit(self) -> None:
        """Which server has a fault that was not met here: behind a router, or in another process?"""
        assert self.current is not None
        for member in [member for member in self._members if member.ready]:
            try:
                found = await member.server.version()
                if found != self.current.label:
                    raise Stale(f"{member.server.url}: reports weights {found!r}, not {self.current.label!r}")
            except EngineError as error:
                if member.ready:
                    self._take_out(member, error)

    def _nurses(self) -> list[asyncio.Task[None]]:
        return [member.nurse for member in self._members if member.nurse]

    def _errand(self, call: Coroutine[Any, Any, None]) -> None:
        """Do something nobody waits for; its failure tells nothing new."""

        async def run() -> None:
            with suppress(EngineError):
                await call

        task = asyncio.create_task(run())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
