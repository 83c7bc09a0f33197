"""Ticks and spans of charts at the edges of floating point."""

import pytest

from empo2_jax.charts import line_chart, ticks


@pytest.mark.parametrize(
    "values", [[0.9999999999999999, 1.0], [1e-13, 3e-13], [2e-20], [-1e-16, 1e-16], [0.0], [1e300, 2e300], [-5.0, -5.0]]
)
def test_every_finite_curve_can_be_drawn(values: list[float]) -> None:
    markup = line_chart("title", {"curve": [(float(x), y) for x, y in enumerate(values)]}, "iteration")
    assert markup.startswith("<svg") and "nan" not in markup and "inf" not in markup


def test_tiny_ticks_are_distinct_and_enclose_the_values() -> None:
    assert ticks(1e-13, 3e-13) == pytest.approx([1e-13, 1.5e-13, 2e-13, 2.5e-13, 3e-13])


def test_iterations_have_no_ticks_between_them() -> None:
    assert ">1.5<" not in line_chart("score", {"a": [(1.0, 0.0), (2.0, 4.0), (3.0, 8.0)]}, "iteration")
    assert ">1.5<" in line_chart("score", {"a": [(1.0, 0.0), (2.2, 4.0), (3.0, 8.0)]}, "minutes")
