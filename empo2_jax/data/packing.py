"""Rows to batches of few fixed shapes, and values of batches back to rows; numpy only.

Packing changes no number of the loss: the weights of tokens are set before it. A row longer than the largest bucket is
kept out of the loss and reported; it is never cut.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from empo2_jax.types import Row, TrainBatch


class Placement(NamedTuple):
    """Where one row lies."""

    batch: int
    sequence: int
    start: int  # tokens
    length: int  # tokens


class Packed(NamedTuple):
    """Batches and the way back; `placements[i]` belongs to row `kept[i]` of the rows given to `pack`."""

    batches: list[TrainBatch]
    placements: list[Placement]
    kept: list[int]  # ascending
    dropped: list[int]  # rows longer than the largest bucket


class _Bin(NamedTuple):
    bucket: int
    rows: list[int]


def pack(rows: Sequence[Row], buckets: Sequence[int], micro_batch_tokens: int, multiple: int = 1) -> Packed:
    """First-fit decreasing into sequences of the bucket lengths; empty sequences fill the last batch of a length.

    Small buckets are left out where that needs fewer batches.

    Args:
        rows: Rows; ledgers that are `None` become 0, and `rollout_weight` 1.
        buckets: Sequence lengths T, ascending.
        micro_batch_tokens: Tokens of one batch, padding included: its shape is [micro_batch_tokens // T, T].
        multiple: The number of sequences is a multiple of this (devices along the batch axis), at least once.
    """
    lengths = [len(row.token_ids) for row in rows]
    kept = [index for index, length in enumerate(lengths) if length <= buckets[-1]]
    dropped = [index for index, length in enumerate(lengths) if length > buckets[-1]]
    heights = {T: max(micro_batch_tokens // T // multiple, 1) * multiple for T in buckets}
    plans = [_plan(_fill(kept, lengths, buckets[first:]), heights) for first in range(len(buckets))]
    batches, where = [], {}
    for number, (bucket, bins) in enumerate(min(plans, key=len)):
        batches.append(_batch(rows, [part.rows for part in bins], heights[bucket], bucket))
        for sequence, part in enumerate(bins):
            start = 0
            for index in part.rows:
                where[index] = Placement(number, sequence, start, lengths[index])
                start += lengths[index]
    return Packed(batches, [where[index] for index in kept], kept, dropped)


def unpack(
    values: Sequence[Float[np.ndarray, "_ _"]], placements: Sequence[Placement]
) -> list[Float32[np.ndarray, " _"]]:
    """Per-token values [B, T] of every batch, cut back to the rows that `placements` describes."""
    return [np.asarray(values[at.batch][at.sequence, at.start : at.start + at.length], np.float32) for at in placements]


def _fill(order: Sequence[int], lengths: Sequence[int], buckets: Sequence[int]) -> list[_Bin]:
    bins: list[_Bin] = []
    room: list[int] = []
    for index in sorted(order, key=lambda row: -lengths[row]):
        fit = next((number for number, free in enumerate(room) if free >= lengths[index]), None)
        if fit is None:
            bucket = next(T for T in buckets if lengths[index] <= T)
            bins.append(_Bin(bucket, []))
            room.append(bucket)
            fit = len(bins) - 1
        bins[fit].rows.append(index)
        room[fit] -= lengths[index]
    return bins


def _plan(bins: Sequence[_Bin], heights: dict[int, int]) -> list[tuple[int, list[_Bin]]]:
    plan = []
    for bucket, height in heights.items():
        alike = [part for part in bins if part.bucket == bucket]
        plan += [(bucket, alike[first : first + height]) for first in range(0, len(alike), height)]
    return plan


def _batch(rows: Sequence[Row], sequences: Sequence[Sequence[int]], height: int, length: int) -> TrainBatch:
    shape = (height, length)
    batch = TrainBatch(
        token_ids=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, bool),
        advantages=np.zeros(shape, np.float32),
        denominator_logprobs=np.zeros(shape, np.float32),
        rollout_weight=np.ones(shape, np.float32),
        token_weight=np.zeros(shape, np.float32),
        mask_threshold=np.zeros(shape, np.float32),
        reference_logprobs=np.zeros(shape, np.float32),
        mode=np.zeros(shape, np.int8),
    )
    for sequence, indices in enumerate(sequences):
        start = 0
        for segment, index in enumerate(indices, 1):
            row = rows[index]
            at = (sequence, slice(start, start + len(row.token_ids)))
            _write(batch, at, row, segment)
            start += len(row.token_ids)
    return batch


def _write(batch: TrainBatch, at: tuple[int, slice], row: Row, segment: int) -> None:
    batch.token_ids[at] = row.token_ids
    batch.segment_ids[at] = segment
    batch.positions[at] = np.arange(len(row.token_ids))
    batch.loss_mask[at] = row.loss_mask
    batch.advantages[at] = row.advantages
    batch.token_weight[at] = row.token_weight
    batch.mask_threshold[at] = row.mask_threshold
    batch.mode[at] = row.mode
    ledgers = (
        (batch.denominator_logprobs, row.denominator_logprobs),
        (batch.reference_logprobs, row.reference_logprobs),
        (batch.rollout_weight, row.rollout_weight),
    )
    for target, values in ledgers:
        if values is not None:
            target[at] = values
