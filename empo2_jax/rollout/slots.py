"""Which request owns which slot of a KV cache, and which of its tokens can be reused.

The host's mirror of the cache: the valid token ids of every slot. It plans where a batch of prompts goes and how much
of each prompt is already there. A named session keeps its slot; a prompt without a session takes over a free slot that
it mostly continues; the others take free slots, the least recently used first. What is there is the longest common
prefix with the slot's own ids or, for a newcomer, with another slot, whose KV is then copied; also with one whose
request still runs. A prompt can also be copied from one of the same batch that is computed in an earlier `stage`, so
that the shared prompt of a group is computed once. No arrays of the device are touched here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int32

TokenIds = Int32[np.ndarray, " _"]  # of any length, also inside a sequence of prompts

_MIN_COPY = 16  # tokens a copy must save over the slot's own prefix


@dataclass(frozen=True)
class Placement:
    """Where one prompt goes and how it gets its cached prefix."""

    slot: int
    cached: int  # tokens of the prompt that need no computation; at least the last one always does
    source: int | None = None  # slot to copy from before computing the rest
    stage: int = 0  # computed after all placements of lower stages


class SlotTable:
    """Slots of a fixed number, each with up to `max_length` valid tokens."""

    def __init__(self, slots: int, max_length: int):
        self._ids = np.zeros((slots, max_length), np.int32)
        self._lengths = np.zeros(slots, np.int32)
        self._sessions: list[str | None] = [None] * slots
        self._used = [0] * slots  # clock of the last use
        self._busy: set[int] = set()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    @property
    def free(self) -> int:
        """Slots that no running request holds."""
        return len(self) - len(self._busy)

    def waves(self, sessions: Sequence[str]) -> list[list[int]]:
        """Indices of `sessions` in runs of at most as many as there are slots; sessions that own a slot go first."""
        order = sorted(range(len(sessions)), key=lambda index: sessions[index] not in self)
        return [order[start : start + len(self)] for start in range(0, len(order), len(self))]

    def place(
        self, sessions: Sequence[str], prompts: Sequence[TokenIds], reusable: Sequence[int] | None = None
    ) -> list[Placement]:
        """Give every prompt a slot and plan the reuse; the slots are busy and hold nothing valid until declared.

        Args:
            sessions: Distinct names, or "" for prompts without a session; at most as many as there are free slots.
            prompts: Their token ids, none empty.
            reusable: Tokens of each prompt that may be taken from a cache (default: all but the last).
        """
        limits = [len(prompt) - 1 for prompt in prompts] if reusable is None else reusable
        owners = {session: slot for slot, session in enumerate(self._sessions) if session is not None}
        own = {index: owners[session] for index, session in enumerate(sessions) if session in owners}
        spare = set(range(len(self))) - set(own.values()) - self._busy
        for index, session in enumerate(sessions):
            if not session and (slot := self._continued(prompts[index], limits[index], sorted(spare))) is not None:
                own[index] = slot
                spare.remove(slot)
        oldest = iter(sorted(spare, key=lambda slot: (self._sessions[slot] is not None, self._used[slot])))
        slots = [own[index] if index in own else next(oldest) for index in range(len(sessions))]
        donors = [slot for slot in range(len(self)) if slot in own.values() or slot not in slots]
        placements: list[Placement] = []
        for index, (slot, prompt) in enumerate(zip(slots, prompts, strict=True)):
            placement = Placement(slot, int(self._shared(prompt, limits[index], [slot])[0]))
            if index not in own:
                placement = self._from_donor(placement, prompt, limits[index], donors)
                placement = _from_batch(placement, prompt, limits[index], placements, prompts)
            placements.append(placement)
        self._clock += 1
        for session, slot in zip(sessions, slots, strict=True):
            self._sessions[slot], self._used[slot], self._lengths[slot] = session or None, self._clock, 0
        self._busy |= set(slots)
        return placements

    def hold(self, slot: int, ids: TokenIds) -> None:
        """Declare what a busy slot's cache holds so far; its request runs on and only appends."""
        self._ids[slot, : len(ids)] = ids
        self._lengths[slot] = len(ids)

    def commit(self, slot: int, ids: TokenIds) -> None:
        """Declare what the slot's cache holds now that its request has ended."""
        self.hold(slot, ids)
        self._busy.discard(slot)

    def release(self, session: str) -> None:
        """Free the slot of a session, if it has one."""
        if session in self._sessions:
            slot = self._sessions.index(session)
            self._sessions[slot], self._lengths[slot] = None, 0

    def clear(self) -> None:
        """Forget what every slot holds; running requests keep theirs."""
        self._sessions = [None] * len(self)
        self._lengths[:] = 0

    def _shared(self, prompt: TokenIds, limit: int, slots: Sequence[int]) -> Int32[np.ndarray, " slots"]:
        """Length of the common prefix with each slot's valid ids, at most `limit`."""
        limits = np.minimum(self._lengths[slots], limit)
        width = int(limits.max(initial=0))
        equal = self._ids[slots, :width] == prompt[:width]
        run = np.where(equal.all(axis=1), width, np.argmin(equal, axis=1) if width else 0)
        return np.minimum(run, limits).astype(np.int32)

    def _continued(self, prompt: TokenIds, limit: int, slots: Sequence[int]) -> int | None:
        """The slot that shares most with a prompt, if little is lost by taking it over."""
        if not slots:
            return None
        shared = self._shared(prompt, limit, slots)
        best = int(np.argmax(shared))
        kept_most = 2 * shared[best] >= self._lengths[slots[best]]
        return slots[best] if shared[best] >= _MIN_COPY and kept_most else None

    def _from_donor(self, placement: Placement, prompt: TokenIds, limit: int, donors: Sequence[int]) -> Placement:
        if not donors:
            return placement
        shared = self._shared(prompt, limit, donors)
        best = int(np.argmax(shared))
        if shared[best] < placement.cached + _MIN_COPY:
            return placement
        return replace(placement, cached=int(shared[best]), source=donors[best])


def _from_batch(
    placement: Placement,
    prompt: TokenIds,
    limit: int,
    earlier: Sequence[Placement],
    prompts: Sequence[TokenIds],
) -> Placement:
    """Copy from a prompt placed before in the same batch where that saves enough."""
    best = placement
    for other, theirs in zip(earlier, prompts, strict=False):
        reach = min(limit, len(theirs))
        if reach < best.cached + _MIN_COPY:
            continue
        differ = np.flatnonzero(prompt[:reach] != theirs[:reach])
        shared = int(differ[0]) if differ.size else reach
        if shared >= best.cached + _MIN_COPY:
            best = Placement(placement.slot, shared, other.slot, other.stage + 1)
    return best
