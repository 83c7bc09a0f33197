"""Where charts place what, and ticks and spans at the edges of floating point."""

import re

import pytest

from empo2_jax.charts import COLORS, interval_chart, line_chart, scatter_chart, ticks


@pytest.mark.parametrize(
    "values", [[0.9999999999999999, 1.0], [1e-13, 3e-13], [2e-20], [-1e-16, 1e-16], [0.0], [1e300, 2e300], [-5.0, -5.0]]
)
def test_every_finite_curve_can_be_drawn(values: list[float]) -> None:
    markup = line_chart("title", {"curve": [(float(x), y) for x, y in enumerate(values)]}, "iteration")
    assert markup.startswith("<svg") and "nan" not in markup and "inf" not in markup


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3.0, 47.0, [-10, 0, 10, 20, 30, 40, 50]), (5.0, 5.5, None)],
)
def test_ticks_are_round_and_enclose(low: float, high: float, expected: list[float] | None) -> None:
    values = ticks(low, high)
    assert values[0] <= low and values[-1] >= high
    assert expected is None or values == expected


def test_chart_places_points_and_escapes_labels() -> None:
    svg = line_chart("a <title>", {"<x>": [(0.0, 0.0), (1.0, 1.0)], "gone": [(0.0, float("nan"))]})
    assert 'points="62.0,230.0 466.0,14.0"' in svg
    assert ">…" + "y" * 26 + "<" in line_chart("long", {"x" * 9 + "y" * 26: [(0.0, 0.0)]})
    assert "&lt;x&gt;" in svg and "gone" not in svg and 'aria-label="a &lt;title&gt;"' in svg
    assert line_chart("empty", {"a": []}) == ""


def test_dots_are_placed_by_their_span_and_labels_are_shifted_apart() -> None:
    one = scatter_chart("map", {"<a>": [(0.0, 0.0, 2.0), (2.0, 1.0, 5.0), (float("nan"), 0.0, 1.0)]})
    assert '<circle cx="62.0" cy="230.0" r="2.0"' in one and '<circle cx="466.0" cy="14.0" r="5.0"' in one
    assert one.count("<circle") == 3 and "&lt;a&gt;" in one  # the third is the legend's
    two = scatter_chart("map", {"a": [(0.0, 0.0, 2.0), (2.0, 1.0, 2.0)], "b": [(0.0, 0.0, 2.0)]})
    assert 'cx="62.0" cy="226.0"' in two and 'cx="62.0" cy="234.0"' in two  # 4 up, 4 down
    assert scatter_chart("map", {"a": []}) == ""


def test_tiny_ticks_are_distinct_and_enclose_the_values() -> None:
    assert ticks(1e-13, 3e-13) == pytest.approx([1e-13, 1.5e-13, 2e-13, 2.5e-13, 3e-13])


def test_iterations_have_no_ticks_between_them() -> None:
    assert ">1.5<" not in line_chart("score", {"a": [(1.0, 0.0), (2.0, 4.0), (3.0, 8.0)]}, "iteration")
    assert ">1.5<" in line_chart("score", {"a": [(1.0, 0.0), (2.2, 4.0), (3.0, 8.0)]}, "minutes")


def test_a_line_keeps_its_color_where_another_has_no_points() -> None:
    points = [(1.0, 0.0), (2.0, 4.0)]
    assert COLORS[1] in line_chart("score", {"a": [], "b": points})
    assert COLORS[0] not in line_chart("score", {"a": [], "b": points})


def test_bands_enclose_their_line_and_infinite_ones_are_left_out() -> None:
    line = {"a": [(0.0, 1.0), (1.0, 2.0)]}
    markup = line_chart("score", line, bands={"a": [(0.0, 0.0, 2.0), (1.0, 1.0, 4.0)]})
    # The axis goes from 0 to 4: the last high end is at its top, the first low end at its bottom.
    assert '<polygon points="62.0,122.0 466.0,14.0 466.0,176.0 62.0,230.0"' in markup
    infinite = line_chart("score", line, bands={"a": [(0.0, -float("inf"), 2.0), (1.0, 1.0, float("nan"))]})
    assert infinite == line_chart("score", line)


def test_intervals_are_drawn_where_they_are_finite() -> None:
    rows = {"<a>": (5.0, 0.0, 10.0), "b": (5.0, -float("inf"), float("inf"))}
    markup = interval_chart("scores", rows)
    assert '<line x1="190.0" x2="466.0" y1="18" y2="18"' in markup and markup.count('stroke-width="3"') == 1
    assert markup.count("<circle") == 2 and "&lt;a&gt;" in markup
    assert ">0</text>" not in interval_chart("scores", {"a": (5.0, 4.0, 6.0)})
    assert ">0</text>" in interval_chart("scores", {"a": (5.0, 4.0, 6.0)}, zero=True)
    assert interval_chart("scores", {}) == ""


def test_lines_of_many_series_differ_in_color_or_dashes() -> None:
    svg = line_chart("many", {f"s{n}": [(0.0, float(n)), (1.0, float(n))] for n in range(32)})
    strokes = re.findall(r'<polyline [^>]*stroke-width="2" ([^>]*?)/>', svg)
    assert len(strokes) == 32 == len(set(strokes))
