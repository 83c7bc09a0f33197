"""Interquartile mean, bootstrap within strata, paired differences: by hand and by coverage."""

import numpy as np
import pytest

from empo2_jax.study.statistics import Estimate, bootstrap, by_stratum, interquartile_mean, paired_interval


def test_interquartile_mean_by_hand() -> None:
    assert interquartile_mean([[100.0, 0.0, 4.0, 6.0]]) == 5.0  # the middle half of 0, 4, 6, 100
    assert interquartile_mean([[0.0, 4.0], [6.0, 100.0]]) == 5.0
    assert interquartile_mean([[7.0]]) == 7.0


def test_bootstrap_of_constants_is_a_point_and_of_one_value_has_no_end() -> None:
    assert bootstrap([[3.0, 3.0, 3.0]]) == Estimate(3.0, 3.0, 3.0)
    assert bootstrap([[3.0]]) == Estimate(3.0, -np.inf, np.inf)


def test_bootstrap_stays_within_its_strata() -> None:
    # Tasks of 0 and of 100 points, equal over seeds: resampling runs within a task cannot change anything, while
    # resampling all values alike would give anything between 0 and 100.
    assert bootstrap([[0.0] * 4, [100.0] * 4]) == Estimate(50.0, 50.0, 50.0)


def test_bootstrap_interval_is_near_the_normal_one_and_repeats() -> None:
    values = np.random.default_rng(1).normal(10, 2, 400).tolist()
    estimate = bootstrap([values])
    assert estimate == bootstrap([values])
    assert estimate.low < 10 < estimate.high
    # The interquartile mean of a normal sample has 1.09 times the standard error of its mean.
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * 2 / 20 * 1.09, rel=0.15)


def test_by_stratum_turns_rows_into_tasks() -> None:
    assert by_stratum([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 4.0}]) == [[1.0, 3.0], [2.0, 4.0]]


def test_paired_interval_of_a_constant_difference_is_a_point() -> None:
    assert paired_interval([5.0, 7.0, 9.0], [2.0, 4.0, 6.0]) == Estimate(3.0, 3.0, 3.0)
    assert paired_interval([5.0], [2.0]) == Estimate(3.0, -np.inf, np.inf)


def test_paired_interval_covers_the_mean_and_shrinks_with_pairs() -> None:
    noise = np.random.default_rng(0).normal(0, 1, 400).tolist()
    few, many = paired_interval(noise[:10], [0.0] * 10), paired_interval(noise, [0.0] * 400)
    for estimate in (few, many):
        assert estimate.low < estimate.value < estimate.high
    assert many.high - many.low < 0.4 * (few.high - few.low)
    assert many.high - many.low == pytest.approx(2 * 1.96 / 20, abs=0.05)
