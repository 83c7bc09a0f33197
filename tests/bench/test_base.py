import math

import numpy as np
import pytest

from empo2_jax.bench.base import Case, Measured, Peaks, Result, Sample, Spread, difference, differences


def measured(*walls, figures=None):
    return Measured(tuple(Sample(wall, 2 * wall) for wall in walls), 1e6, figures or {})


CASE = Case("fake/case", "m:ours", "m:peer", tolerances={"value": 1e-5})


def test_speed_is_the_median_of_the_ratios_of_the_pairs_not_the_ratio_of_medians():
    result = Result(CASE, measured(1.0, 2.0, 10.0), measured(2.0, 8.0, 10.0), {"value": 0.0})
    assert result.speed("wall") == Spread(2.0, 1.0, 4.0)
    assert result.speed("cpu") == Spread(2.0, 1.0, 4.0)
    assert result.figures()["wall_ratio"] == 2.0
    assert result.figures()["seconds"] == 2.0


@pytest.mark.parametrize("differences", [{"value": 2e-5}, {"value": math.inf}, {}])
def test_a_speed_without_equality_is_void(differences):
    figures = {"bytes": 10.0}
    result = Result(CASE, measured(1.0, figures=figures), measured(2.0, figures=figures), differences)
    assert result.equal is False
    assert result.speed("wall") is None
    assert not [name for name in result.figures() if name.endswith("_ratio")]


def test_without_a_peer_there_is_no_ratio_but_ours_is_shown():
    result = Result(CASE, measured(1.0, figures={"error": 0.5}), None, problem="peer: torch is not installed")
    assert result.equal is None
    assert result.figures() == {"rss": 1e6, "error": 0.5, "seconds": 1.0, "cpu_seconds": 2.0}
    assert Result(CASE, None, measured(1.0)).figures() == {}


def test_a_speed_needs_answers_to_compare():
    case = Case("fake/case", "m:ours", "m:peer")
    assert Result(case, measured(1.0), measured(2.0)).speed("wall") is None


def test_figures_of_both_sides_give_a_ratio_also_where_nothing_is_timed():
    case = Case("fake/case", "m:ours", "m:peer", timed=False)
    result = Result(case, Measured((), 1e6, {"bytes": 10.0}), Measured((), 1e6, {"bytes": 60.0, "other": 1.0}))
    assert result.figures() == {"rss": 1e6, "bytes": 10.0, "bytes_ratio": 6.0}


def test_limit_is_the_slower_of_arithmetic_and_memory():
    peaks = Peaks(flops=100.0, bandwidth=10.0)
    assert Result(Case("a/b", "m:f", flops=50.0, bytes=1.0), None, None).limit(peaks) == 0.5
    assert Result(Case("a/b", "m:f", flops=50.0, bytes=20.0), None, None).limit(peaks) == 2.0
    assert Result(Case("a/b", "m:f"), None, None).limit(peaks) is None


def test_difference():
    assert difference(np.array([1, 2]), np.array([1, 5])) == 3.0
    assert difference(np.zeros(0), np.zeros(0)) == 0.0
    assert difference(np.zeros(2), np.zeros((2, 1))) == math.inf
    assert difference(np.array([np.nan]), np.array([np.nan])) == math.inf
    assert differences({"a": np.ones(1)}, {"b": np.ones(1)}, ["a"]) == {"a": math.inf}
