"""Limits on failed episodes, warnings on numbers that cannot work."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from empo2_jax.alarms import MAX_GAP, PERIOD, count_skipped, refuse_many_failures, warn, warn_of_trends
from empo2_jax.config import RunConfig
from empo2_jax.errors import EnvError, UpdateError
from empo2_jax.run_logs import RunLogs
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


def record(iteration: int, **changed: float | str) -> dict[str, Any]:
    """An iteration without an alarm: half of the groups are tied, memory brings 20 points."""
    names = {"equal": "group/all_equal", "phantom": "group/phantom", "success": "episode/success_rate"}
    names |= {"bare": "empo2/on/reward", "told": "empo2/on_memory/reward", "off": "empo2/off/reward"}
    usual = {"equal": 0.25, "phantom": 0.25, "success": 0.1, "bare": 20.0, "told": 40.0, "off": 40.0} | changed
    shares = {"empo2/on_memory/share": 0.25, "empo2/off/share": 0.5, "reward/std": 30.0}
    return {"iteration": iteration, **shares, **{names[name]: value for name, value in usual.items()}}


@pytest.mark.parametrize(
    ("equal", "phantom", "success", "said"),
    [
        (0.9, 0.0, 0.0, "90 % of the groups"),
        (0.25, 0.75, 0.0, "100 % of the groups"),  # that novelty differs does not help
        (0.875, 0.0, 0.0, ""),
        (1.0, 0.0, 0.5, "100 % of the groups"),  # half of the tasks are solved, the others never
        (1.0, 0.0, 0.9, ""),  # there is nothing left to learn
        ("nan", 0.0, 0.0, ""),
    ],
)
def test_groups_that_all_end_alike_are_said(
    equal: float | str, phantom: float, success: float, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_trends([record(1 + n, equal=equal, phantom=phantom, success=success) for n in range(PERIOD)])
    assert said in caplog.text
    assert [entry.getMessage().endswith("#groups-that-all-fail") for entry in caplog.records] == [True] * bool(said)


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ([8.0] * 10, "had 8.0 points less than those without (standard error 0.0) in the last 10 iterations"),
        ([7.0] * 10, ""),  # less than a quarter of the rewards' deviation, 30
        # Deviation of ten values 10 and -10 around a mean m: sqrt(1000 / 9) = 10.54; standard error 3.33.
        ([20.1, 0.1] * 5, "had 10.1 points less than those without (standard error 3.3)"),
        ([19.9, -0.1] * 5, ""),  # less than three standard errors
        ([-50.0] * 10, ""),
    ],
)
def test_memory_that_costs_points_is_said(costs: list[float], said: str, caplog: pytest.LogCaptureFixture) -> None:
    # A third of those with memory had `told`, two thirds `off`: their mean is `bare` less the cost.
    newest = [record(11 + n, told=20 - cost - 2, off=20 - cost + 1) for n, cost in enumerate(costs)]
    warn_of_trends(newest)
    assert said in caplog.text
    assert [entry.getMessage().endswith("#memory-that-hurts") for entry in caplog.records] == [True] * bool(said)


def test_five_of_ten_iterations_are_enough_and_four_are_not(caplog: pytest.LogCaptureFixture) -> None:
    def without_memory(iteration: int) -> dict[str, Any]:
        return {key: value for key, value in record(iteration).items() if "memory" not in key and "off" not in key}

    few = [record(1 + n, told=0.0, off=0.0) if n < 4 else without_memory(1 + n) for n in range(PERIOD)]
    warn_of_trends(few)
    assert not caplog.records
    warn_of_trends([*few[:9], record(10, told=0.0, off=0.0)])
    assert "had 20.0 points less" in caplog.text


def test_iterations_of_one_mode_are_compared_with_none(caplog: pytest.LogCaptureFixture) -> None:
    """One draw per iteration: with memory 0 points in every other one, without it 20."""

    def of_one_mode(iteration: int) -> dict[str, Any]:
        own = {"empo2/on/reward": 20.0} if iteration % 2 else {"empo2/off/reward": 0.0, "empo2/off/share": 1.0}
        rest = {key: value for key, value in record(iteration).items() if not key.startswith("empo2/")}
        return rest | own

    warn_of_trends([of_one_mode(1 + n) for n in range(PERIOD)])
    assert not caplog.records


@pytest.mark.parametrize("cut", [9, 10, 13, 19])
def test_a_run_that_was_killed_says_the_same(cut: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def play(folder: Path, cursor: dict[str, int], last: int) -> dict[str, int]:
        logs = RunLogs(folder, cursor, RunConfig(tensorboard=False), writes=True, decode=lambda ids: "")
        for number in range(cursor.get("iteration", 0) + 1, last + 1):
            bad = (
                {"equal": 1.0, "told": -10.0 - number, "off": math.nan if number == 15 else -20.0} if number > 5 else {}
            )
            metrics = record(number, **bad)
            logs.iteration(int(metrics.pop("iteration")), {key: float(value) for key, value in metrics.items()})
            warn_of_trends(logs.newest)
        logs.close()
        return {**logs.cursor(), "iteration": last}

    play(tmp_path / "whole", {}, 21)
    whole = [entry.getMessage() for entry in caplog.records]
    assert len(whole) == 2
    assert all("of the last 10" in text or "in the last 10" in text for text in whole)
    caplog.clear()
    saved = play(tmp_path / "killed", {}, cut)
    said = len(caplog.records)
    play(tmp_path / "killed", saved, min(cut + 2, 21))  # beyond the checkpoint, then killed
    del caplog.records[said:]
    play(tmp_path / "killed", saved, 21)
    assert [entry.getMessage() for entry in caplog.records] == whole


def test_a_process_that_writes_nothing_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = RunLogs(tmp_path, {}, RunConfig(), writes=False, decode=lambda ids: "")
    for number in range(1, 11):
        logs.iteration(number, {"group/all_equal": 1.0, "group/phantom": 0.0, "episode/success_rate": 0.0})
        warn_of_trends(logs.newest)
    assert not caplog.records
