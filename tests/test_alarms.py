"""Limits on failed episodes, warnings on numbers that cannot work."""

import logging
import math

import pytest

from empo2_jax.alarms import MAX_GAP, count_skipped, refuse_many_failures, warn
from empo2_jax.errors import EnvError, UpdateError
from empo2_jax.types import Episode, Mode, StopReason, Task


def episodes(good: int, bad: int) -> list[Episode]:
    def make(stop: StopReason) -> Episode:
        return Episode("e", Task("toy", "bulb", 0), "", Mode.ON_POLICY, (), stop, 0.0, False, 0, error="no Java")

    return [make(StopReason.DONE)] * good + [make(StopReason.ENV_ERROR)] * bad


def test_a_few_failures_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    refuse_many_failures(episodes(98, 2))
    assert not caplog.records


def test_more_than_two_percent_warn_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    refuse_many_failures(episodes(97, 3))
    assert "3 of 100 episodes failed (env_error: no Java)" in caplog.text


def test_more_than_a_fifth_end_the_run() -> None:
    refuse_many_failures(episodes(80, 20))
    with pytest.raises(EnvError, match="21 of 100 episodes failed"):
        refuse_many_failures(episodes(79, 21))


def test_the_third_skipped_update_in_a_row_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    in_a_row = 0
    for skipped, expected in ((True, 1), (True, 2), (False, 0), (False, 0), (True, 1), (True, 2)):
        in_a_row = count_skipped(in_a_row, skipped, "iteration 7, update 2")
        assert in_a_row == expected
    assert len(caplog.records) == 4
    assert "iteration 7, update 2: the loss or the gradient is not finite; the update was skipped" in caplog.text
    with pytest.raises(UpdateError, match=r"iteration 7, update 3: .* 3 updates in a row"):
        count_skipped(in_a_row, True, "iteration 7, update 3")


def test_gap_and_too_few_updates_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn({"actor/updates": 4.0, "mismatch/logprob_abs_diff_max": 0.01, "memory/tips_missing": 3.0}, 1e-6, 1e-4, 100)
    assert "3 episodes left no tip" in caplog.text
    assert "differ by 1.0e-02 nats" in caplog.text
    assert "4 updates per iteration" in caplog.text
    assert "longer than the largest" not in caplog.text
    warn({"actor/updates": 9.0, "memory/tips_missing": 0.0, "actor/rows_too_long": 2.0}, 1e-6, 1e-4, 100)
    assert "2 rows are longer than the largest of update.buckets" in caplog.text
    caplog.clear()
    quiet = {"actor/updates": 4.0, "memory/tips_missing": 0.0}
    warn(quiet | {"mismatch/logprob_abs_diff_max": 1e-6}, 1e-4, MAX_GAP["float32"], 100)
    warn(quiet | {"mismatch/logprob_abs_diff_max": 1e-2}, 1e-4, MAX_GAP["bfloat16"], 100)
    assert not caplog.records


@pytest.mark.parametrize(
    ("entropy", "said"),
    [
        (0.009, "9.0e-03 nats per token: it repeats itself"),
        (0.01, ""),
        (3.2, ""),
        (3.3, "it guesses"),
        (math.nan, "nan"),
    ],
)
def test_a_policy_that_repeats_itself_or_guesses_is_said(
    entropy: float, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = {"actor/updates": 9.0, "memory/tips_missing": 0.0, "actor/entropy": entropy}
    warn(metrics, 1e-4, 1e-4, 100)  # ln 100 = 4.605, of which 70 % are 3.22
    assert said in caplog.text
    assert bool(caplog.records) == bool(said)
