"""Packing by hand: shapes, segments, padding and rows that do not fit."""

import dataclasses

import numpy as np

from empo2_jax.data.packing import Placement, branch_room, fits, pack, unpack
from empo2_jax.data.rows import build_rows
from empo2_jax.types import Mode, Row
from tests.fixtures.episodes import make_episode


def row_of(length: int, episode: int = 0) -> Row:
    action = tuple(range(100, 100 + length - 2))
    (row,) = build_rows([make_episode((action,), mode=Mode.ON_POLICY)], [1.5], min_token_prob=0.25, mask_modes="all")
    return dataclasses.replace(row, episode=episode)


def test_first_fit_decreasing_by_hand() -> None:
    packed = pack([row_of(3), row_of(6), row_of(5), row_of(3)], [8], 16)
    # decreasing: 6 | 5 + 3 | 3; two sequences a batch
    assert packed.placements == [
        Placement(0, 1, 5, 3),
        Placement(0, 0, 0, 6),
        Placement(0, 1, 0, 5),
        Placement(1, 0, 0, 3),
    ]
    first, second = packed.batches
    assert first.segment_ids.tolist() == [[1] * 6 + [0] * 2, [1] * 5 + [2] * 3]
    assert first.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 0], [0, 1, 2, 3, 4, 0, 1, 2]]
    assert second.segment_ids.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [0] * 8]


def test_padding_has_no_loss_and_harmless_values() -> None:
    (batch,) = pack([row_of(4)], [8], 16).batches
    padding = batch.segment_ids == 0
    assert padding.sum() == 12
    assert not batch.loss_mask[padding].any()
    assert not batch.token_weight[padding].any()
    assert (batch.rollout_weight == 1).all()
    assert batch.mask_threshold[0].tolist() == [0.25] * 4 + [0.0] * 4
    assert batch.advantages[0].tolist() == [0, 0, 1.5, 1.5, 0, 0, 0, 0]


def test_ledgers_are_carried() -> None:
    ledger = np.arange(4, dtype=np.float32)
    row = dataclasses.replace(
        row_of(4), denominator_logprobs=-ledger, reference_logprobs=-2 * ledger, rollout_weight=ledger / 4
    )
    (batch,) = pack([row], [4], 4).batches
    np.testing.assert_array_equal(batch.denominator_logprobs, [-ledger])
    np.testing.assert_array_equal(batch.reference_logprobs, [-2 * ledger])
    np.testing.assert_array_equal(batch.rollout_weight, [ledger / 4])


def test_shapes_come_from_the_buckets_alone() -> None:
    rows = [row_of(length) for length in (3, 4, 7, 8, 15, 16, 30, 3, 9, 31) for _ in range(3)]
    shapes = {batch.token_ids.shape for batch in pack(rows, [4, 8, 16, 32], 64).batches}
    assert shapes <= {(16, 4), (8, 8), (4, 16), (2, 32)}


def test_rows_with_branches_lie_apart_trunks_before_branches() -> None:
    made = [make_episode([[30, 31], [40]], mode=Mode.ON_POLICY_WITH_MEMORY, latest=(3, 1)), make_episode([[50]])]
    rows = build_rows(made, [1.0, 1.0], branch_room=99)
    packed = pack([rows[0], rows[1], rows[0]], [8, 16], 48)
    assert packed.placements == [Placement(1, 0, 0, 7, 16, 9), Placement(0, 0, 0, 3), Placement(1, 0, 7, 7, 25, 9)]
    plain, tree = packed.batches
    assert (plain.token_ids.shape, plain.branches) == ((6, 8), None)
    assert tree.token_ids.shape == (1, 48) and tree.branches is not None
    assert tree.token_ids[0, :7].tolist() == [1, 10, 30, 31, 1, 11, 40]
    assert tree.token_ids[0, 16:25].tolist() == [90, 91, 92, 10, 30, 31, 90, 11, 40]
    assert tree.branches.ids[0].tolist() == [1] * 6 + [2] * 3 + [3] * 6 + [4] * 3 + [0] * 14
    assert tree.branches.limits[0, :18].tolist() == [1] * 6 + [5] * 3 + [8] * 6 + [12] * 3
    assert tree.positions[0, 16:25].tolist() == [1, 2, 3, 4, 5, 6, 5, 6, 7]
    assert tree.segment_ids[0, 16:34].tolist() == [1] * 9 + [2] * 9
    back = unpack([batch.token_ids.astype(np.float32) for batch in packed.batches], packed.placements)
    assert [values.tolist() for values in back] == [rows[index].token_ids.tolist() for index in (0, 1, 0)]


def test_a_row_with_branches_beyond_every_shape_is_reported() -> None:
    made = [make_episode([[30]], mode=Mode.ON_POLICY_WITH_MEMORY, latest=(count,)) for count in (4, 8)]
    rows = build_rows(made, [1.0, 1.0], branch_room=2)
    assert [len(row.token_ids) - row.trunk for row in rows] == [6, 10]
    assert pack(rows, [8], 16).dropped == [1]
    assert [fits(row, [8], 16) for row in rows] == [True, False]
    assert (branch_room([8], 16), branch_room([8], 32), branch_room([4, 8], 32, 2)) == (8, 24, 8)


def test_small_buckets_are_left_out_where_that_saves_a_batch() -> None:
    packed = pack([row_of(4), row_of(8)], [4, 8], 16)
    assert [batch.token_ids.shape for batch in packed.batches] == [(2, 8)]


def test_number_of_sequences_is_a_multiple_of_the_devices() -> None:
    (batch,) = pack([row_of(4)], [8], 24, multiple=2).batches
    assert batch.token_ids.shape == (2, 8)
    (batch,) = pack([row_of(4)], [8], 8, multiple=4).batches
    assert batch.token_ids.shape == (4, 8)


def test_a_row_that_does_not_fit_is_reported_and_never_cut() -> None:
    rows = [row_of(9), row_of(4), row_of(8)]
    packed = pack(rows, [4, 8], 8)
    assert (packed.kept, packed.dropped) == ([1, 2], [0])
    back = unpack([batch.advantages for batch in packed.batches], packed.placements)
    assert [len(values) for values in back] == [4, 8]
    assert pack(rows[:1], [4, 8], 8).batches == []
