import numpy as np
import pytest

from empo2_jax.rollout.slots import Placement, SlotTable


def tokens(*ids):
    return np.asarray(ids, np.int32)


def serve(table, sessions, prompts):
    """Place and commit, as an engine does."""
    placements = table.place(sessions, prompts)
    for placement, prompt in zip(placements, prompts, strict=True):
        table.commit(placement.slot, prompt)
    return placements


def test_a_session_keeps_its_slot_and_reuses_the_common_prefix():
    table = SlotTable(2, 100)
    assert serve(table, ["a"], [tokens(1, 2, 3, 4)]) == [Placement(slot=0, cached=0)]
    assert serve(table, ["a"], [tokens(1, 2, 3, 9, 9)]) == [Placement(slot=0, cached=3)]
    assert serve(table, ["a"], [tokens(1, 2)]) == [Placement(slot=0, cached=1)]  # the last token is computed again
    assert serve(table, ["a"], [tokens(7)]) == [Placement(slot=0, cached=0)]


def test_an_uncommitted_slot_serves_nothing():
    table = SlotTable(1, 100)
    serve(table, ["a"], [np.arange(50, dtype=np.int32)])
    table.place(["a"], [np.arange(50, dtype=np.int32)])
    assert table.place(["a"], [np.arange(50, dtype=np.int32)])[0].cached == 0


def test_the_least_recently_used_session_is_evicted():
    table = SlotTable(2, 100)
    serve(table, ["a"], [tokens(1, 1)])
    serve(table, ["b"], [tokens(2, 2)])
    serve(table, ["a"], [tokens(1, 1, 1)])
    assert serve(table, ["c"], [tokens(3, 3)])[0].slot == 1
    assert "b" not in table and "a" in table and "c" in table


def test_a_released_slot_is_taken_first_and_is_empty():
    table = SlotTable(2, 100)
    prompt = np.arange(40, dtype=np.int32)
    serve(table, ["a", "b"], [tokens(50, 51), prompt])
    table.release("b")
    table.release("unknown")
    assert "a" in table and "b" not in table
    assert serve(table, ["c"], [prompt]) == [Placement(slot=1, cached=0)]


@pytest.mark.parametrize(("shared", "expected"), [(20, Placement(1, 20, source=0)), (15, Placement(1, 0))])
def test_a_new_session_copies_from_another_one_if_that_saves_16_tokens(shared, expected):
    table = SlotTable(2, 100)
    prompt = np.arange(40, dtype=np.int32)
    serve(table, ["a"], [prompt])
    other = np.concatenate([prompt[:shared], 99 - prompt[shared:]])
    assert serve(table, ["b"], [other]) == [expected]


def test_a_group_computes_its_prompt_once():
    table = SlotTable(4, 100)
    prompt = np.arange(40, dtype=np.int32)
    longer = np.concatenate([prompt, prompt])
    placements = table.place(["a", "b", "c", "d"], [prompt, prompt, longer, longer])
    assert placements == [
        Placement(0, 0),
        Placement(1, 39, source=0, stage=1),
        Placement(2, 40, source=0, stage=1),
        Placement(3, 79, source=2, stage=2),
    ]


def test_a_slot_that_is_being_evicted_is_no_donor_for_others():
    table = SlotTable(2, 100)
    first, second = np.arange(40, dtype=np.int32), np.arange(40, 80, dtype=np.int32)
    serve(table, ["a", "b"], [first, second])
    placements = table.place(["c", "d"], [second, first])  # take the slots of a and b
    assert placements == [Placement(0, 0), Placement(1, 0)]


def test_waves_serve_resident_sessions_first():
    table = SlotTable(2, 100)
    serve(table, ["c", "d"], [tokens(1, 2), tokens(3, 4)])
    assert table.waves(["a", "b", "c", "d", "e"]) == [[2, 3], [0, 1], [4]]
    assert table.waves([]) == []


def test_a_prompt_without_a_session_takes_over_the_slot_it_continues():
    table = SlotTable(3, 100)
    first, second = np.arange(40, dtype=np.int32), np.arange(50, 90, dtype=np.int32)
    serve(table, ["", ""], [first, second])
    longer = np.concatenate([second, first])
    assert serve(table, [""], [longer]) == [Placement(1, 40)]
    rolled_back = np.concatenate([longer[:41], tokens(99, 99)])
    assert serve(table, [""], [rolled_back]) == [Placement(1, 41)]
    other = np.concatenate([first[:18], second])  # would lose most of the slot: copied into an empty one
    assert serve(table, [""], [other]) == [Placement(2, 18, source=0)]


def test_prompts_without_a_session_may_be_equal_and_only_one_takes_the_slot_over():
    table = SlotTable(3, 100)
    prompt = np.arange(40, dtype=np.int32)
    serve(table, [""], [prompt])
    assert table.place(["", ""], [prompt, prompt]) == [Placement(0, 39), Placement(1, 39, source=0)]


def test_running_requests_keep_their_slots_and_lend_their_prompts():
    table = SlotTable(2, 100)
    prompt = np.arange(40, dtype=np.int32)
    assert table.free == 2
    (running,) = table.place([""], [prompt])
    table.hold(running.slot, prompt)
    assert table.free == 1
    table.clear()  # new weights: nothing is lent any more
    assert table.place([""], [prompt]) == [Placement(1, 0)]
    assert table.free == 0
    table.commit(1, prompt)
    table.commit(running.slot, prompt[:0])
    assert table.free == 2
    (again,) = table.place([""], [np.concatenate([prompt, prompt])])
    table.hold(again.slot, np.concatenate([prompt, prompt]))
    assert again == Placement(1, 40)
    assert table.place([""], [np.concatenate([prompt, prompt[:30], prompt])]) == [Placement(0, 70, source=1)]


def test_what_is_to_be_scored_is_not_taken_from_a_cache():
    table = SlotTable(2, 100)
    prompt = np.arange(60, dtype=np.int32)
    serve(table, [""], [prompt])
    assert serve(table, [""], [prompt]) == [Placement(0, 59)]
    assert table.place(["", ""], [prompt, prompt], [40, 0]) == [Placement(0, 40), Placement(1, 0)]
