"""Rows by hand: merging, prompts by mode, ledgers, weights and mini-batches."""

import dataclasses

import numpy as np
import pytest

from empo2_jax.data.rows import acting_rows, build_rows, drop_unlikely_steps, minibatches, token_weights, transfer
from empo2_jax.types import Branch, Mode
from tests.fixtures.episodes import TIP_ID, make_episode

ACTIONS = ((5, 6), (7,), (8, 9, 5))


def test_append_only_prompt_gives_one_row() -> None:
    (row,) = build_rows([make_episode(ACTIONS)], [2.0])
    assert row.token_ids.tolist() == [1, 10, 5, 6, 1, 11, 7, 1, 12, 8, 9, 5]
    assert row.step_index.tolist() == [-1, -1, 0, 0, -1, -1, 1, -1, -1, 2, 2, 2]
    assert row.loss_mask.tolist() == [step >= 0 for step in row.step_index.tolist()]
    assert row.advantages.tolist() == [2.0 if on else 0.0 for on in row.loss_mask.tolist()]
    expected = [0, 0, -0.1, -0.11, 0, 0, -0.2, 0, 0, -0.3, -0.31, -0.32]
    np.testing.assert_allclose(row.behavior_logprobs, expected, rtol=1e-6)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_step_has_its_own_advantage(rebuilt: bool) -> None:
    rows = build_rows([make_episode(ACTIONS, rebuilt=rebuilt)], [np.array([2.0, -1.0, 0.5])])
    found = np.concatenate([row.advantages[row.loss_mask] for row in rows])
    assert found.tolist() == [2.0, 2.0, -1.0, 0.5, 0.5, 0.5]
    assert not any(row.advantages[~row.loss_mask].any() for row in rows)


def test_rebuilt_prompt_gives_one_row_per_step() -> None:
    rows = build_rows([make_episode(ACTIONS, rebuilt=True)], [1.0])
    assert [row.token_ids.tolist() for row in rows] == [[1, 10, 5, 6], [1, 11, 7], [1, 12, 8, 9, 5]]
    assert [sorted(set(row.step_index.tolist())) for row in rows] == [[-1, 0], [-1, 1], [-1, 2]]
    assert {row.episode for row in rows} == {0}


def test_a_row_breaks_where_the_prompt_no_longer_holds_the_sampled_ids() -> None:
    episode = make_episode(((5, 6), (7,)))
    second = dataclasses.replace(episode.steps[1], bare_prompt_ids=np.array([1, 10, 5, 4, 1, 11], np.int32))
    rows = build_rows([dataclasses.replace(episode, steps=(episode.steps[0], second))], [1.0])
    assert [row.token_ids.tolist() for row in rows] == [[1, 10, 5, 6], [1, 10, 5, 4, 1, 11, 7]]


@pytest.mark.parametrize("mode", list(Mode))
def test_prompt_of_the_loss_by_mode(mode: Mode) -> None:
    (row,) = build_rows([make_episode(ACTIONS, mode=mode)], [1.0], min_token_prob=0.01)
    assert (TIP_ID in row.token_ids) == (mode == Mode.ON_POLICY_WITH_MEMORY)
    assert row.token_ids[row.loss_mask].tolist() == [5, 6, 7, 8, 9, 5]
    assert row.mask_threshold == (0.01 if mode == Mode.OFF_POLICY else 0.0)
    (every,) = build_rows([make_episode(ACTIONS, mode=mode)], [1.0], min_token_prob=0.01, mask_modes="all")
    assert every.mask_threshold == 0.01


def test_a_row_with_too_many_branches_goes_on_in_another_with_the_trunk_again() -> None:
    episode = make_episode([[5, 6], [7], [8]], mode=Mode.ON_POLICY_WITH_MEMORY, latest=(2, 0, 3))
    first, second = build_rows([episode], [2.0], branch_room=6)
    (whole,) = build_rows([episode], [2.0], branch_room=10)
    trunk = [1, 10, 5, 6, 1, 11, 7, 1, 12, 8]
    assert whole.token_ids.tolist() == [*trunk, 90, 91, 10, 5, 6, 90, 91, 92, 12, 8]
    assert whole.branches == (Branch(1, 5), Branch(8, 5))
    assert whole.token_ids[whole.loss_mask].tolist() == [7, 5, 6, 8]  # the step without tips on the trunk
    assert whole.step_index.tolist() == [-1, -1, 0, 0, -1, -1, 1, -1, -1, 2, -1, -1, -1, 0, 0, -1, -1, -1, -1, 2]
    assert first.token_ids.tolist() == [*trunk[:7], 90, 91, 10, 5, 6]
    assert second.token_ids.tolist() == [*trunk, 90, 91, 92, 12, 8]
    assert (first.branches, second.branches) == ((Branch(1, 5),), (Branch(8, 5),))
    assert [row.token_ids[row.loss_mask].tolist() for row in (first, second)] == [[7, 5, 6], [8]]
    assert second.step_index.tolist() == [-1] * 9 + [2] + [-1] * 4 + [2]
    weighted = token_weights([first, second], "seq-mean-token-mean")
    assert sum(float(row.token_weight.sum()) for row in weighted) == pytest.approx(1.0)
    values = [np.arange(len(row.token_ids), dtype=np.float32) for row in (first, second)]
    there = transfer([first, second], values, [whole], [np.zeros(20, np.float32)])
    assert there[0][whole.loss_mask].tolist() == [6, 10, 11, 14]
    bare = transfer([first, second], values, [whole], [np.zeros(20, np.float32)], trunk=True)
    assert bare[0][whole.loss_mask].tolist() == [6, 2, 3, 9]


def test_values_move_from_acting_rows_to_loss_rows_by_episode_step_and_offset() -> None:
    plain, off = make_episode(ACTIONS), make_episode(ACTIONS, mode=Mode.OFF_POLICY, rebuilt=True)
    rows, acting = build_rows([plain, off], [1.0, 1.0]), acting_rows([plain, off])
    assert [row.episode for row in acting] == [1, 1, 1]
    assert all(TIP_ID in row.token_ids for row in acting)
    moved = transfer(
        acting, [(row.step_index * 10 + row.token_ids).astype(np.float32) for row in acting], rows,
        [np.full(len(row.token_ids), -1, np.float32) for row in rows],
    )  # fmt: skip
    assert moved[0].tolist() == [-1.0] * 12
    assert [values[row.loss_mask].tolist() for row, values in zip(rows[1:], moved[1:], strict=True)] == [
        [5.0, 6.0],
        [17.0],
        [28.0, 29.0, 25.0],
    ]
    assert [values[~row.loss_mask].tolist() for row, values in zip(rows[1:], moved[1:], strict=True)] == [[-1, -1]] * 3


def test_transfer_undoes_itself_across_merging() -> None:
    episode = make_episode(ACTIONS, mode=Mode.OFF_POLICY)
    rows, acting = build_rows([episode], [1.0]), acting_rows([episode])
    there = transfer(
        rows, [row.behavior_logprobs for row in rows], acting, [0 * row.behavior_logprobs for row in acting]
    )
    np.testing.assert_array_equal(there[0], acting[0].behavior_logprobs)


def test_weights_sum_to_one_or_to_the_tokens_per_step() -> None:
    rows = build_rows([make_episode(ACTIONS), make_episode(((5,),), rebuilt=True)], [1.0, 0.0])
    totals = {
        name: sum(float(row.token_weight.sum()) for row in token_weights(rows, name))
        for name in ("token-mean", "seq-mean-token-mean", "episode-mean", "seq-mean-token-sum")
    }
    assert totals == pytest.approx(
        {"token-mean": 1, "seq-mean-token-mean": 1, "episode-mean": 1, "seq-mean-token-sum": 7 / 4}
    )


def test_row_mask_drops_the_whole_step_and_keeps_other_weights() -> None:
    (row,) = token_weights(
        build_rows([make_episode(ACTIONS)], [-1.0], min_token_prob=0.01, mask_modes="all"), "token-mean"
    )
    old = np.where(np.arange(12) == 10, np.log(0.009), np.log(0.011)).astype(np.float32)
    (kept,) = drop_unlikely_steps([dataclasses.replace(row, denominator_logprobs=old)])
    np.testing.assert_allclose(kept.token_weight[row.loss_mask], [1 / 6, 1 / 6, 1 / 6, 0, 0, 0], rtol=1e-6)
    assert kept.mask_threshold == 0
    positive = dataclasses.replace(row, denominator_logprobs=old, advantages=-row.advantages)
    (spared,) = drop_unlikely_steps([positive], mask_sign="negative")
    np.testing.assert_array_equal(spared.token_weight, row.token_weight)


def test_row_mask_leaves_rows_without_a_threshold_alone() -> None:
    (row,) = token_weights(build_rows([make_episode(ACTIONS)], [-1.0]), "token-mean")
    row = dataclasses.replace(row, denominator_logprobs=np.full(12, -50, np.float32))
    assert drop_unlikely_steps([row])[0] is row


def test_minibatches_keep_episodes_whole_and_use_each_once() -> None:
    steps = [3, 4, 1, 5, 2]
    found = minibatches(steps, 5, np.array([4, 0, 3, 1, 2]))
    assert found == [[4, 0], [3], [1, 2]]
    assert minibatches(steps, 1, np.arange(5)) == [[0], [1], [2], [3], [4]]
    assert minibatches(steps, 99, np.arange(5)) == [[0, 1, 2, 3, 4]]
    assert minibatches([], 5, np.arange(0)) == []


def test_row_mask_without_denominators_is_refused() -> None:
    (row,) = build_rows([make_episode(ACTIONS)], [-1.0], min_token_prob=0.01, mask_modes="all")
    with pytest.raises(ValueError, match="denominator_logprobs"):
        drop_unlikely_steps([row])
