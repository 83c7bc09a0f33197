"""Counter-based draws: fixed values, no state, no dependence on the order of asking."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from empo2_jax.experience import draw_tasks
from empo2_jax.randomness import generator, uniform, words
from empo2_jax.types import Task

TASKS = [Task("toy", "bulb", number) for number in range(5)]
names = st.tuples(st.integers(0, 99), st.sampled_from(["mode", "action"]), st.integers(0, 99), st.integers(0, 99))


def test_values_of_today_are_the_values_of_tomorrow():
    assert words(0, "action", "i0/g0/e0", 3).tolist() == [682747914, 2220104842]
    assert uniform(7, "mode", 1, 2, 3) == pytest.approx(0.8831278559579351, abs=1e-16)
    assert generator(0, "tasks", 0, 0).permutation(8).tolist() == [4, 7, 1, 3, 5, 0, 2, 6]


@given(names, names)
def test_a_draw_is_a_function_of_its_name_alone(one: tuple, other: tuple):
    first = (words(*one).tolist(), uniform(*one), generator(*one).random())
    words(*other), uniform(*other), generator(*other).random(5)
    assert (words(*one).tolist(), uniform(*one), generator(*one).random()) == first
    assert (words(*other).tolist() == first[0]) == (one == other)


def test_every_part_of_the_name_counts():
    draws = [words(*name).tolist() for name in [(0, "a", 1, 2), (1, "a", 1, 2), (0, "b", 1, 2), (0, "a", 2, 1)]]
    draws += [words(0, "a", 12).tolist(), words(0, "a").tolist(), words(0, "a", 1, 2, 0).tolist()]
    assert len({tuple(draw) for draw in draws}) == len(draws)


@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_words_are_32_bit_and_as_many_as_asked(count: int):
    drawn = words(3, "x", count=count)
    assert drawn.shape == (count,) and drawn.dtype == np.uint32


def test_uniform_draws_fill_the_unit_interval_evenly():
    values = np.array([uniform(0, "u", number) for number in range(4000)])
    assert values.min() >= 0 and values.max() < 1
    assert np.abs(np.histogram(values, 8, (0, 1))[0] / 500 - 1).max() < 0.2  # 4.5 standard deviations
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.07


@given(st.integers(0, 17), st.integers(0, 50))
def test_tasks_repeat_only_when_all_were_drawn(count: int, iteration: int):
    drawn = draw_tasks(TASKS, count, 0, iteration)
    assert len(drawn) == count
    for start in range(0, count, 5):
        part = drawn[start : start + 5]
        assert len(set(part)) == len(part)
    assert drawn == draw_tasks(TASKS, count, 0, iteration)


def test_iterations_and_rounds_draw_differently():
    drawn = [draw_tasks(TASKS, 10, 0, iteration) for iteration in range(4)]
    assert len({tuple(task.variation for task in tasks) for tasks in drawn}) == 4
    assert any(tasks[:5] != tasks[5:] for tasks in drawn)
