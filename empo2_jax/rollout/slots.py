"""Which session owns which slot of a KV cache, and which of its tokens can be reused.

The host's mirror of the cache: the valid token ids of every slot. It plans where a batch of prompts goes (a session
keeps its slot, new ones take free slots, then the least recently used) and how much of each prompt is already there:
the longest common prefix with the slot's own ids or, for a new session, with the slot of another one, whose KV is then
copied. A prompt can also be copied from one of the same batch that is computed in an earlier `stage`, so that the
shared prompt of a group is computed once. No arrays of the device are touched here.
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
        self._clock = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    def waves(self, sessions: Sequence[str]) -> list[list[int]]:
        """Indices of `sessions` in runs of at most as many as there are slots; sessions that own a slot go first."""
        order = sorted(range(len(sessions)), key=lambda index: sessions[index] not in self)
        return [order[start : start + len(self)] for start in range(0, len(order), len(self))]

    def place(self, sessions: Sequence[str], prompts: Sequence[TokenIds]) -> list[Placement]:
        """Give every session a slot and plan the reuse; the slots hold nothing valid until `commit`.

        Args:
            sessions: Distinct names, at most as many as there are slots.
            prompts: Their token ids, none empty.
        """
        owners = {session: slot for slot, session in enumerate(self._sessions) if session is not None}
        kept = {owners[session] for session in sessions if session in owners}
        spare = iter(sorted(set(range(len(self))) - kept, key=lambda s: (self._sessions[s] is not None, self._used[s])))
        slots = [owners[session] if session in owners else next(spare) for session in sessions]
        donors = [slot for slot in range(len(self)) if slot in kept or slot not in slots]
        placements: list[Placement] = []
        for session, slot, prompt in zip(sessions, slots, prompts, strict=True):
            placement = Placement(slot, int(self._shared(prompt, [slot])[0]))
            if session not in owners:
                placement = self._from_donor(placement, prompt, donors)
                placement = _from_batch(placement, prompt, placements, prompts)
            placements.append(placement)
        self._clock += 1
        for session, slot in zip(sessions, slots, strict=True):
            self._sessions[slot], self._used[slot], self._lengths[slot] = session, self._clock, 0
        return placements

    def commit(self, slot: int, ids: TokenIds) -> None:
        """Declare what the slot's cache holds now."""
        self._ids[slot, : len(ids)] = ids
        self._lengths[slot] = len(ids)

    def release(self, session: str) -> None:
        """Free the slot of a session, if it has one."""
        if session in self._sessions:
            slot = self._sessions.index(session)
            self._sessions[slot], self._lengths[slot] = None, 0

    def clear(self) -> None:
        """Free every slot."""
        self._sessions = [None] * len(self)
        self._lengths[:] = 0

    def _shared(self, prompt: TokenIds, slots: Sequence[int]) -> Int32[np.ndarray, " slots"]:
        """Length of the common prefix with each slot's valid ids; the last token of the prompt never counts."""
        limits = np.minimum(self._lengths[slots], len(prompt) - 1)
        width = int(limits.max(initial=0))
        equal = self._ids[slots, :width] == prompt[:width]
        run = np.where(equal.all(axis=1), width, np.argmin(equal, axis=1) if width else 0)
        return np.minimum(run, limits).astype(np.int32)

    def _from_donor(self, placement: Placement, prompt: TokenIds, donors: Sequence[int]) -> Placement:
        if not donors:
            return placement
        shared = self._shared(prompt, donors)
        best = int(np.argmax(shared))
        if shared[best] < placement.cached + _MIN_COPY:
            return placement
        return replace(placement, cached=int(shared[best]), source=donors[best])


def _from_batch(
    placement: Placement,
    prompt: TokenIds,
    earlier: Sequence[Placement],
    prompts: Sequence[TokenIds],
) -> Placement:
    """Copy from a prompt placed before in the same batch where that saves enough."""
    best = placement
    for other, theirs in zip(earlier, prompts, strict=False):
        limit = min(len(prompt) - 1, len(theirs))
        if limit < best.cached + _MIN_COPY:
            continue
        differ = np.flatnonzero(prompt[:limit] != theirs[:limit])
        shared = int(differ[0]) if differ.size else limit
        if shared >= best.cached + _MIN_COPY:
            best = Placement(placement.slot, shared, other.slot, other.stage + 1)
    return best
