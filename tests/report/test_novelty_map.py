"""The map: directions of the greatest variance, and what it says where there is nothing to draw."""

import numpy as np
import pytest

from empo2_jax.report.memory_content import Content
from empo2_jax.report.novelty_map import DOTS, Visits, project, section
from empo2_jax.report.run_files import Kept
from tests.fixtures.recorded import episode, step


def test_the_main_directions_are_found_and_their_share_is_right() -> None:
    # Variance 8 along the second axis, 2 along the fourth, 0.5 along the first.
    states = np.zeros((6, 4), np.float32)
    states[0, 1], states[1, 1] = -2.0, 2.0
    states[2, 3], states[3, 3] = 1.0, -1.0
    states[4, 0], states[5, 0] = 0.5, -0.5
    places, share = project(states)
    np.testing.assert_allclose(np.abs(places), [[2, 0], [2, 0], [0, 1], [0, 1], [0, 0], [0, 0]], atol=1e-12)
    assert share == pytest.approx(10 / 10.5)
    assert (places.max(axis=0) > 0).all()


@pytest.mark.parametrize("states", [np.ones((1, 3)), np.ones((4, 3)), np.arange(3.0)[:, None]])
def test_few_or_equal_states_have_places_too(states: np.ndarray) -> None:
    places, share = project(states.astype(np.float32))
    assert places.shape == (len(states), 2) and np.isfinite(places).all() and 0 <= share <= 1


def test_the_map_has_a_dot_per_state_and_counts_visits() -> None:
    kept = Kept(8, Content(), {"a": [1, 10], "b": [5]}, np.eye(3, dtype=np.float32))
    (chart,) = section(kept, Visits()).charts
    assert chart.svg.count("<circle") == 3 + 2  # and two in the legend
    assert "3 distinct states at checkpoint 8" in chart.note and "up to 10 times" in chart.note
    assert chart.table is not None and chart.table.rows == [["a", "2", "11", "10"], ["b", "1", "5", "5"]]


def test_many_states_and_tasks_are_thinned_and_said_to_be() -> None:
    count = DOTS + 700
    visits = {f"task {n}": [1] * (count // 11) for n in range(11)}
    states = np.random.default_rng(0).standard_normal((sum(map(len, visits.values())), 6)).astype(np.float32)
    (chart,) = section(Kept(8, Content(), visits, states), Visits()).charts
    assert f"{DOTS:,} of them are drawn" in chart.note
    assert chart.svg.count("<circle") == DOTS + 8 and ">others<" in chart.svg


def test_states_are_counted_by_their_text_with_what_was_paid() -> None:
    visits = Visits()
    visits.add(3, [episode(steps=[step("hall", novelty=5.0), step("attic", novelty=1.0), step("hall")])])
    visits.add(9, [episode(steps=[step("hall", novelty=0.5), step("attic", novelty=0.25)])])
    (table,) = section(None, visits).tables
    assert [[row[0].text, *row[1:]] for row in table.rows] == [
        ["attic", "toy/lamp/0", "2", "3 – 9", "5 → 0.5"],
        ["hall", "toy/lamp/0", "1", "3 – 3", "1 → 1"],
    ]


def test_a_missing_map_is_explained() -> None:
    assert "no checkpoint" in section(None, Visits()).missing[0]
    no_entries = Kept(8, Content(), {}, np.zeros((0, 0), np.float32))
    assert "no state is kept at checkpoint 8" in section(no_entries, Visits()).missing[0]
    too_many = section(Kept(8, Content(), {"a": [1]}, np.zeros((0, 0), np.float32)), Visits())
    assert not too_many.charts
