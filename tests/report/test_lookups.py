"""What memory answered, counted by hand, and what is shown of empty and huge memories."""

import json

import numpy as np

from empo2_jax.report.lookups import Lookups, section
from empo2_jax.report.memory_content import BEST, Content, read_content
from empo2_jax.report.run_files import Kept
from empo2_jax.report.tip_effects import TipEffects
from tests.fixtures.recorded import episode, step, tip

NO_STATES = np.zeros((0, 0), np.float32)
LEFT, RIGHT = ("go left (action : go ; score : 70 )", 70.0), ("go right (action : go ; score : 20 )", 20.0)


def content(entries: list[dict]) -> Content:
    return read_content(json.dumps(entry).encode() for entry in entries)


def looked_up() -> Lookups:
    lookups = Lookups()
    steps = [step("hall", [LEFT, RIGHT]), step("kitchen")]
    lookups.add(2, [episode(mode="OFF_POLICY", steps=steps), episode(steps=[step("attic")])])
    lookups.add(5, [episode(mode="ON_POLICY_WITH_MEMORY", steps=[step("hall", [LEFT])])])
    return lookups


def test_lookups_are_counted_by_task_and_state_and_only_with_memory() -> None:
    states = looked_up().states
    assert set(states) == {("toy/lamp/0", "hall"), ("toy/lamp/0", "kitchen")}
    hall = states["toy/lamp/0", "hall"]
    assert (hall.asked, hall.answered, hall.first, hall.last) == (2, 2, 2, 5)
    assert hall.tips == {LEFT[0]: 2, RIGHT[0]: 1}


def test_states_stand_with_the_tips_that_they_got() -> None:
    made = section(looked_up(), None, TipEffects())
    assert made.about == "3 lookups were recorded, and 2 of them found a tip."
    (table,) = made.tables
    assert [[row[0].text, *row[1:]] for row in table.rows] == [
        ["hall", "toy/lamp/0", f"2× {LEFT[0]} [70]\n1× {RIGHT[0]} [20]", "2 of 2", "2 – 5"],
        ["kitchen", "toy/lamp/0", "none", "0 of 1", "2 – 2"],
    ]
    assert made.missing == ["The content of the memory is not shown: no checkpoint of this run can be read."]


def test_entries_stand_with_the_gain_of_their_tip() -> None:
    effects = TipEffects()
    effects.add([episode(score=10.0), episode("i0/g0/e1", "OFF_POLICY", 40.0, steps=[step(tips=[LEFT])])])
    entries = [tip(RIGHT[0], 20.0, counter=1, iteration=4), tip(LEFT[0], 70.0, buffer="other", episode="i1/g2/e3")]
    _, buffers, memory = section(looked_up(), Kept(6, content(entries), {}, NO_STATES), effects).tables
    assert buffers.rows == [["other", "1", "70.0", "70.0", "0 – 0"], ["toy/lamp/0", "1", "20.0", "20.0", "4 – 4"]]
    assert [[*row[:3], row[3].search, *row[4:]] for row in memory.rows] == [
        [LEFT[0], "other", "70.0", "i1/g2/e3", "1", "+30.0"],
        [RIGHT[0], "toy/lamp/0", "20.0", "i0/g0/e0", "0", "–"],
    ]


def test_an_empty_memory_and_a_huge_one_are_said_to_be_that() -> None:
    empty = section(Lookups(), Kept(6, Content(), {}, NO_STATES), TipEffects())
    assert empty.missing == ["No recorded episode acted with memory.", "The memory is empty at checkpoint 6."]
    many = [tip(f"tip {n}", float(n % 7), counter=n, buffer=f"b{n % 90}") for n in range(20_000)]
    buffers, memory = section(Lookups(), Kept(6, content(many), {}, NO_STATES), TipEffects()).tables
    assert len(memory.rows) == BEST
    assert "Entries: the first 300 of 20,000, best score first" in memory.note
    assert "Buffers: the first 50 of 90, largest first." in buffers.note
    assert memory.rows[0][0] == "tip 19998"  # the newest of the best
