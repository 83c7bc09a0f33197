"""Rows to batches of few fixed shapes, and values of batches back to rows; numpy only.

Packing changes no number of the loss: the weights of tokens are set before it. A row that no shape has room for is kept
out of the loss and reported; it is never cut. Rows with branches have batches of their own, one shape for each bucket:
trunks in the bucket, branches in what is left of the tokens of a batch.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int32

from empo2_jax.types import Branches, Row, TrainBatch


class Placement(NamedTuple):
    """Where one row lies, in columns."""

    batch: int
    sequence: int
    start: int
    length: int
    branches_start: int = 0
    branches_length: int = 0

    @property
    def columns(self) -> Int32[np.ndarray, " _"]:
        """Of every token of the row."""
        pieces = (self.start, self.length), (self.branches_start, self.branches_length)
        return np.concatenate([np.arange(start, start + length, dtype=np.int32) for start, length in pieces])


class Packed(NamedTuple):
    """Batches and the way back; `placements[i]` belongs to row `kept[i]` of the rows given to `pack`."""

    batches: list[TrainBatch]
    placements: list[Placement]
    kept: list[int]  # ascending
    dropped: list[int]  # rows longer than the largest bucket


class _Shape(NamedTuple):
    trunks: int  # columns
    branches: int  # columns
    height: int  # sequences


class _Bin(NamedTuple):
    shape: _Shape
    rows: list[int]


def branch_room(buckets: Sequence[int], micro_batch_tokens: int, multiple: int = 1) -> int:
    """Tokens of branches that a row may have whatever the length of its trunk."""
    return _shapes(buckets[-1:], micro_batch_tokens, multiple, branches=True)[0].branches


def fits(row: Row, buckets: Sequence[int], micro_batch_tokens: int, multiple: int = 1) -> bool:
    """Whether some shape has room for the row."""
    shapes = _shapes(buckets, micro_batch_tokens, multiple, branches=bool(row.branches))
    return any(_holds(shape, row) for shape in shapes)


def pack(rows: Sequence[Row], buckets: Sequence[int], micro_batch_tokens: int, multiple: int = 1) -> Packed:
    """First-fit decreasing into sequences of few shapes; empty sequences fill the last batch of a shape.

    Small buckets are left out where that needs fewer batches.

    Args:
        rows: Rows; ledgers that are `None` become 0, and `rollout_weight` 1.
        buckets: Sequence lengths T, ascending.
        micro_batch_tokens: Tokens of one batch, padding included: its shape is [micro_batch_tokens // T, T], or for
            rows with branches [multiple, micro_batch_tokens // multiple].
        multiple: The number of sequences is a multiple of this (devices along the batch axis), at least once.
    """
    kept = [index for index, row in enumerate(rows) if fits(row, buckets, micro_batch_tokens, multiple)]
    dropped = sorted({*range(len(rows))} - {*kept})
    batches: list[TrainBatch] = []
    where: dict[int, Placement] = {}
    for branches in (False, True):
        alike = [index for index in kept if bool(rows[index].branches) == branches]
        shapes = _shapes(buckets, micro_batch_tokens, multiple, branches)
        plans = [_plan(_fill(rows, alike, shapes[first:]), shapes) for first in range(len(shapes))]
        for shape, bins in min(plans, key=len):
            placed = _place(rows, bins, shape.trunks, len(batches))
            batches.append(_batch(rows, placed, shape))
            where |= placed
    return Packed(batches, [where[index] for index in kept], kept, dropped)


def unpack(
    values: Sequence[Float[np.ndarray, "_ _"]], placements: Sequence[Placement]
) -> list[Float32[np.ndarray, " _"]]:
    """Per-token values [B, T] of every batch, cut back to the rows that `placements` describes."""
    return [np.asarray(values[at.batch][at.sequence, at.columns], np.float32) for at in placements]


def _shapes(buckets: Sequence[int], micro_batch_tokens: int, multiple: int, branches: bool) -> list[_Shape]:
    if not branches:
        return [_Shape(T, 0, max(micro_batch_tokens // T // multiple, 1) * multiple) for T in buckets]
    return [_Shape(T, max(micro_batch_tokens // multiple - T, T), multiple) for T in buckets]


def _holds(shape: _Shape, row: Row) -> bool:
    return row.trunk <= shape.trunks and len(row.token_ids) - row.trunk <= shape.branches


def _fill(rows: Sequence[Row], order: Sequence[int], shapes: Sequence[_Shape]) -> list[_Bin]:
    bins: list[_Bin] = []
    room: list[_Shape] = []
    for index in sorted(order, key=lambda number: -len(rows[number].token_ids)):
        row = rows[index]
        fit = next((number for number, free in enumerate(room) if _holds(free, row)), None)
        if fit is None:
            bins.append(_Bin(next(shape for shape in shapes if _holds(shape, row)), []))
            room.append(bins[-1].shape)
            fit = len(bins) - 1
        bins[fit].rows.append(index)
        trunks, branches, height = room[fit]
        room[fit] = _Shape(trunks - row.trunk, branches - (len(row.token_ids) - row.trunk), height)
    return bins


def _plan(bins: Sequence[_Bin], shapes: Sequence[_Shape]) -> list[tuple[_Shape, list[_Bin]]]:
    plan = []
    for shape in shapes:
        alike = [part for part in bins if part.shape == shape]
        plan += [(shape, alike[first : first + shape.height]) for first in range(0, len(alike), shape.height)]
    return plan


def _place(rows: Sequence[Row], bins: Sequence[_Bin], trunks: int, batch: int) -> dict[int, Placement]:
    where = {}
    for sequence, part in enumerate(bins):
        start, branches_start = 0, trunks
        for index in part.rows:
            row = rows[index]
            at = Placement(batch, sequence, start, row.trunk, branches_start, len(row.token_ids) - row.trunk)
            where[index] = at if row.branches else at._replace(branches_start=0)
            start, branches_start = start + at.length, branches_start + at.branches_length
    return where


def _batch(rows: Sequence[Row], placed: Mapping[int, Placement], shape: _Shape) -> TrainBatch:
    size = (shape.height, shape.trunks + shape.branches)
    branches = [np.zeros((shape.height, shape.branches), np.int32) for _ in Branches._fields]
    batch = TrainBatch(
        token_ids=np.zeros(size, np.int32),
        segment_ids=np.zeros(size, np.int32),
        positions=np.zeros(size, np.int32),
        loss_mask=np.zeros(size, bool),
        advantages=np.zeros(size, np.float32),
        denominator_logprobs=np.zeros(size, np.float32),
        rollout_weight=np.ones(size, np.float32),
        token_weight=np.zeros(size, np.float32),
        mask_threshold=np.zeros(size, np.float32),
        reference_logprobs=np.zeros(size, np.float32),
        mode=np.zeros(size, np.int8),
        branches=Branches(*branches) if shape.branches else None,
    )
    for index, at in placed.items():  # in the order of the columns
        _write(batch, at, rows[index])
        if batch.branches is not None:
            _write_branches(batch.branches, at, at.branches_start - shape.trunks, rows[index])
    return batch


def _write_branches(branches: Branches, where: Placement, start: int, row: Row) -> None:
    for branch in row.branches:
        at = (where.sequence, slice(start, start + branch.length))
        branches.ids[at] = branches.ids[where.sequence].max() + 1
        branches.limits[at] = where.start + branch.cut
        start += branch.length


def _write(batch: TrainBatch, where: Placement, row: Row) -> None:
    at = (where.sequence, where.columns)
    batch.token_ids[at] = row.token_ids
    batch.segment_ids[at] = batch.segment_ids[where.sequence].max() + 1
    pieces = [(0, row.trunk), *row.branches]
    batch.positions[at] = np.concatenate([np.arange(start, start + length) for start, length in pieces])
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
