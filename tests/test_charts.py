"""Where charts place what, and ticks and spans at the edges of floating point."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from empo2_jax.charts import COLORS, interval_chart, line_chart, scatter_chart, tick_texts, ticks


@pytest.mark.parametrize(
    "values",
    [
        [0.9999999999999999, 1.0],
        [1e-13, 3e-13],
        [2e-20],
        [-1e-16, 1e-16],
        [0.0],
        [1e300, 2e300],
        [-5.0, -5.0],
        [5e-324, 1e-310],
    ],
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


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], ["0", "0.5", "1"]),
        ([0.0, 2000.0, 8000.0], ["0", "2000", "8000"]),
        ([0.0, 5000.0, 10000.0], ["0", "5k", "10k"]),
        ([-50_000.0, 0.0, 250_000.0], ["-50k", "0", "250k"]),
        ([0.0, 5e5, 1.5e6], ["0", "0.5M", "1.5M"]),
        ([2e9, 2.5e9], ["2G", "2.5G"]),
        ([0.0, 2.5e-5, 1e-12], ["0", "2.5e-5", "1e-12"]),
        ([1e300, 2e300], ["1e300", "2e300"]),
        ([1000.001, 1000.002], ["1000.001", "1000.002"]),  # four digits would not tell them apart
        ([1_000_100.0, 1_000_200.0], ["1.0001M", "1.0002M"]),
        ([], []),
    ],
)
def test_ticks_are_short_and_differ(values: list[float], expected: list[str]) -> None:
    assert tick_texts(values) == expected


def test_long_ticks_move_the_plot_and_the_last_one_below_is_seen_as_a_whole() -> None:
    svg = line_chart("t", {"a": [(0.0, 1000.0), (2000.0, 1000.004)]}, "step")  # ticks up to 1000.004: 8 digits
    assert 'points="88.0,230.0 466.0,14.0"' in svg and '<text x="82" y="18.0" text-anchor="end">1000.004<' in svg
    assert '<text x="458.0" y="246" text-anchor="middle">2000<' in svg  # 40 units of text and 2 of air before 480
    assert '<text x="466.0" y="246" text-anchor="middle">20<' in line_chart("t", {"a": [(0.0, 0.0), (20.0, 1.0)]})


def test_long_labels_have_a_line_of_the_legend_or_a_wider_margin() -> None:
    points = [(0.0, 0.0), (1.0, 1.0)]
    two, one = (line_chart("t", {"a": points, "b" * count: points}) for count in (20, 21))
    assert 'viewBox="0 0 480 292"' in two and f'<text x="278" y="284">{"b" * 20}<' in two
    assert 'viewBox="0 0 480 314"' in one and f'<text x="44" y="306">{"b" * 21}<' in one
    assert f">…{'長' * 16}<" in line_chart("t", {"長" * 30: points})  # as wide as 27 letters
    short, rows = (interval_chart("t", {label: (0.02, 0.0, 0.05)}) for label in ("c", "c" * 27))
    assert '<line x1="282.0" x2="435.3" y1="18" y2="18"' in rows and 'x="272" y="22" text-anchor="end">ccc' in rows
    assert re.findall(r'middle">(\S+?)<', rows) == ["0", "0.02", "0.04", "0.06"]  # more do not fit beside the labels
    assert re.findall(r'middle">(\S+?)<', short) == ["0", "0.01", "0.02", "0.03", "0.04", "0.05"]


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
    nothing = (float("nan"), float("nan"), float("inf"))
    assert interval_chart("scores", {"a": nothing}) == interval_chart("scores", {"a": nothing}, zero=True) == ""
    beside = interval_chart("scores", {"a": nothing, "b": (5.0, 4.0, 6.0)})
    assert beside.count("<circle") == 1 and ">a</text>" in beside and "nan" not in beside


@given(st.lists(st.tuples(*[st.floats()] * 3), min_size=1, max_size=4), st.booleans())
@example([(1.7e308, -1.7e308, 1.7e308)], False)
@example([(1e307, -1e307, 1e307)], False)
@example([(5e-324, 0.0, 1e-309)], False)
def test_every_float_is_drawn_or_left_out(rows: list[tuple[float, float, float]], zero: bool) -> None:
    charts = [
        line_chart("t", {"c": [(x, y) for x, y, _ in rows]}, "x", {"c": rows}),
        interval_chart("t", {str(number): row for number, row in enumerate(rows)}, zero),
        scatter_chart("t", {"c": rows}),
    ]
    fine = any(abs(x) <= 1e307 for row in rows for x in row)
    assert bool(charts[1]) == fine
    assert not re.search("nan|inf", "".join(charts))


def test_lines_of_many_series_differ_in_color_or_dashes() -> None:
    svg = line_chart("many", {f"s{n}": [(0.0, float(n)), (1.0, float(n))] for n in range(32)})
    strokes = re.findall(r'<polyline [^>]*stroke-width="2" ([^>]*?)/>', svg)
    assert len(strokes) == 32 == len(set(strokes))
