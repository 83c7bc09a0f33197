"""What stands at the head of a page whose numbers need a word of caution."""

import json
from pathlib import Path

import pytest

from empo2_jax.metrics import MetricsLog
from empo2_jax.report.marks import comparable, marks
from empo2_jax.report.run_files import read_run
from tests.fixtures.recorded import evaluation, make_run, write_lines


def test_a_finished_run_has_none(tmp_path: Path) -> None:
    assert marks(read_run(make_run(tmp_path))) == []


def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path, iterations=2, run={"iterations": 40})
    assert marks(read_run(run)) == ["The run is not finished: 2 of 40 iterations. All numbers are up to there."]
    MetricsLog(run, keep=0).close()
    assert "0 of 40 iterations" in marks(read_run(run))[0]
    (run / "config.toml").unlink()
    assert marks(read_run(run)) == ["No iteration is recorded yet."]


@pytest.mark.parametrize(
    ("trials", "last", "expected"),
    [
        (2, (0.5, 0.0), []),
        (10, (1.0, 0.0), []),
        (10, (0.5, 0.0), ["The run is not finished: 2 of 10 trials. All numbers are up to there."]),
        (10, (1.0, 0.25), ["The run is not finished: 2 of 10 trials. All numbers are up to there."]),
    ],
)
def test_trials_end_when_all_is_solved(
    tmp_path: Path, trials: int, last: tuple[float, float], expected: list[str]
) -> None:
    algorithm, intrinsic = {"name": "reflexion", "p_memory": 0.0}, {"kind": "none"}
    lengths = {"run": {"iterations": 40}, "reflexion": {"trials": trials}}
    run = make_run(tmp_path, iterations=1, algorithm=algorithm, intrinsic=intrinsic, **lengths)
    log = MetricsLog(run)
    log.write(2, dict(zip(("episode/success_rate", "episode/invalid"), last, strict=True)))
    log.close()
    assert marks(read_run(run)) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"commit": "c0ffee"}, []),
        ({"commit": "c0ffee-dirty"}, ["The code was changed after its commit: c0ffee-dirty."]),
        (
            {"commit": "beef", "earlier_commits": "c0ffee, dead-dirty"},
            [
                "The run was continued by other code: c0ffee, dead-dirty, then beef.",
                "The code was changed after its commit: dead-dirty.",
            ],
        ),
    ],
)
def test_other_code_is_named(tmp_path: Path, facts: dict[str, str], expected: list[str]) -> None:
    run = make_run(tmp_path)
    (run / "run.json").write_text(json.dumps(facts))
    assert marks(read_run(run)) == expected


def test_evaluations_of_other_problems_or_with_failed_episodes_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    other = [{"task": "lamp", "variation": 7, "scores": [1.0, 2.0], "success": 0.0}]
    lines = [
        evaluation("start", 0, 1.0, rows=other),
        evaluation("during", 1, 2.0, split="dev"),
        evaluation("during", 2, 3.0),
        evaluation("during", 3, 4.0, complete=False),
        evaluation("end", 4, 5.0),
    ]
    write_lines(run / "evaluations.jsonl", *lines)
    assert comparable(lines) == [False, False, True, False, True]
    assert marks(read_run(run)) == [
        "Episodes of these evaluations failed, their means are of a part and in no chart: during @ 3.",
        "These evaluations played other problems than the last one and are in no chart: start @ 0, during @ 1.",
    ]
    assert comparable([evaluation("end", 4, 5.0, complete=False)]) == [False]


def test_values_and_iterations_that_are_left_out_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path, iterations=0)
    log = MetricsLog(run)
    for iteration, entropy in ((1, 0.5), (2, float("nan")), (5, float("inf"))):
        log.write(iteration, {"actor/entropy": entropy})
    log.close()
    assert marks(read_run(run)) == [
        "Not finite, and left out of the charts: actor/entropy in 2 of 3 iterations.",
        "The iterations are not one after another: 2 → 5.",
    ]
