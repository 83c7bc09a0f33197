"""Means of runs with their uncertainty: interquartile mean, stratified bootstrap, paired difference.

The interquartile mean and the bootstrap within each task follow Agarwal et al., "Deep reinforcement learning at the
edge of the statistical precipice" (arXiv 2108.13264); the resampling is SciPy's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; infinite where there are too few values."""

    value: float
    low: float
    high: float


def interquartile_mean(strata: Sequence[Sequence[float]]) -> float:
    """Mean of the middle half of all values."""
    return float(stats.trim_mean(np.concatenate([np.asarray(values, float) for values in strata]), 0.25))


def bootstrap(strata: Sequence[Sequence[float]], resamples: int = 5000) -> Estimate:
    """The interquartile mean of all values with its percentile interval; resampled within each stratum.

    Args:
        strata: Values by stratum (a task: one value per seed).
        resamples: How many; their draws are fixed, the same values give the same interval.
    """
    value = interquartile_mean(strata)
    if min(map(len, strata)) < 2:
        return Estimate(value, -np.inf, np.inf)

    def statistic(*samples: Any, axis: int) -> Any:
        return stats.trim_mean(np.concatenate(samples, axis=axis), 0.25, axis=axis)

    interval = stats.bootstrap(
        [np.asarray(values, float) for values in strata],
        statistic,
        n_resamples=resamples,
        batch=1000,
        vectorized=True,
        paired=False,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high))


def paired_interval(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Mean of first − second over pairs with its interval by Student's t; one pair has an infinite one."""
    difference = np.asarray(first) - np.asarray(second)
    mean, count = float(difference.mean()), len(difference)
    if count < 2:
        return Estimate(mean, -np.inf, np.inf)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * difference.std(ddof=1) / np.sqrt(count))
    return Estimate(mean, mean - reach, mean + reach)


def by_stratum(rows: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """Values by task from rows {task: value}, one row per seed; every row has the same tasks."""
    return [[row[task] for row in rows] for task in rows[0]]
