import dataclasses
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from empo2_jax.bench import goals, runner, table, worker
from empo2_jax.bench.base import PAIRS, Case, Measured, Peaks, Result, Sample
from empo2_jax.cli import main
from empo2_jax.errors import ConfigError

SIDES = "tests.fixtures.bench_sides"
PEAKS = Peaks(1e11, 1e10)


@pytest.fixture
def case(tmp_path):
    return Case(
        "fake/case",
        f"{SIDES}:fast",
        f"{SIDES}:slow",
        arguments={"log": str(tmp_path / "log")},
        tolerances={"value": 1e-6, "more": 0.0},
    )


def with_value(case, value):
    return dataclasses.replace(case, arguments={**case.arguments, "value": value})


@pytest.mark.parametrize("quick", [True, False])
def test_pairs_in_turn_in_their_own_processes_on_the_same_cores(case, quick, tmp_path):
    with runner.pinned() as cores:
        result = runner.run_case(case, quick)
    assert result.problem == ""
    assert result.differences == {"value": 0.0, "more": 0.0}
    assert len(result.ours.samples) == len(result.peer.samples) == PAIRS
    assert 2.0 < result.speed("wall").median < 4.5
    assert result.ours.samples[0].wall == pytest.approx(0.002, rel=1.0)  # per unit of ten
    lines = (tmp_path / "log").read_text().splitlines()
    sides, processes = [line.split()[0] for line in lines], [line.split()[1] for line in lines]
    assert sides == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert len(set(processes)) == (2 if quick else 2 * PAIRS)
    assert {line.split(" ", 2)[2] for line in lines} == {str(cores)}


def test_pinning_ends(monkeypatch):
    before = os.sched_getaffinity(0)
    with runner.pinned() as cores:
        assert os.sched_getaffinity(0) == set(cores)
        assert len(cores) <= runner.CORES
    assert os.sched_getaffinity(0) == before
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="Linux only"), runner.pinned():
        pass


@pytest.mark.parametrize("quick", [True, False])
def test_another_answer_voids_the_row(case, quick):
    result = runner.run_case(with_value(case, 1.1), quick)
    assert result.equal is False
    assert result.differences["value"] == pytest.approx(0.1)
    assert "wall_ratio" not in result.figures()


@pytest.mark.parametrize("quick", [True, False])
def test_a_missing_peer_is_reported_and_ours_still_measured(case, quick):
    result = runner.run_case(dataclasses.replace(case, peer="tests.fixtures.bench_missing:train"), quick)
    assert result.problem == "peer: torch is not installed"
    assert len(result.ours.samples) == PAIRS
    assert result.peer is None


@pytest.mark.parametrize(
    ("function", "problem"), [("crashing", "ValueError: no such luck"), ("dying", "the process ended with code 3")]
)
@pytest.mark.parametrize("quick", [True, False])
def test_a_failing_side_becomes_a_problem_of_one_line(case, quick, function, problem):
    result = runner.run_case(dataclasses.replace(case, ours=f"{SIDES}:{function}"), quick)
    assert result.problem == f"ours: {problem}"
    assert result.ours is None
    assert result.figures() == {}


def test_peak_memory_is_that_of_the_side_alone():
    held = np.ones(300 << 17)  # this process is larger than its child
    result = runner.run_case(Case("fake/case", f"{SIDES}:hungry", arguments={"megabytes": 100}, timed=False), True)
    assert 100 < result.ours.rss / 2**20 < 250 < worker.peak_rss() / 2**20
    assert result.figures()["first"] == held[0]


def result_of(ours=1.0, peer=2.0, *, equal=True, problem=""):
    case = Case("fake/case", "m:ours", "m:peer", tolerances={"value": 0.0})
    sides = [Measured((Sample(wall, wall),) * 3, 1e6, {"bytes": wall}) if wall else None for wall in (ours, peer)]
    return Result(case, *sides, {"value": 0.0 if equal else 1.0}, problem)


@pytest.mark.parametrize(
    ("result", "goal", "code", "said"),
    [
        (result_of(), {"cpu_ratio": {"least": 1.5}, "bytes_ratio": {"least": 2.0}}, 0, "3 of 3 goals met"),
        (result_of(), {"cpu_ratio": {"least": 2.5}}, 1, "MISSED: fake/case cpu_ratio 2, goal ≥ 2.5"),
        (result_of(), {"bytes": {"most": 0.5}}, 1, "MISSED: fake/case bytes 1, goal ≤ 0.5"),
        (
            result_of(),
            {"cpu_ratio": {"least": 2.5, "accepted": 1.9, "adr": 7}},
            0,
            "missed, see ADR 7: fake/case cpu_ratio 2, goal ≥ 2.5\n1 of 2 goals met",
        ),
        (
            result_of(),
            {"bytes": {"most": 0.5, "accepted": 1.0, "adr": 7}},
            0,
            "missed, see ADR 7: fake/case bytes 1, goal ≤ 0.5",
        ),
        (result_of(), {"cpu_ratio": {"least": 2.5, "accepted": 2.1, "adr": 7}}, 1, "MISSED: fake/case cpu_ratio 2"),
        (result_of(), {"bytes": {"most": 0.5, "accepted": 0.9, "adr": 7}}, 1, "MISSED: fake/case bytes 1"),
        (result_of(), {"cpu_ratio": {"least": 1.5, "accepted": 1.0, "adr": 7}}, 0, "2 of 2 goals met"),
        (result_of(equal=False), {"cpu_ratio": {"least": 1.5, "accepted": 1.0, "adr": 7}}, 1, "not measured"),
        (result_of(), {"wall_ratio": {"least": 2.5}}, 0, "warning: fake/case wall_ratio 2, goal ≥ 2.5"),
        (result_of(), {"seconds": {"most": 0.5}}, 0, "warning: fake/case seconds 1, goal ≤ 0.5"),
        (result_of(equal=False), {}, 1, "MISSED: fake/case equal 0, goal yes"),
        (result_of(equal=False), {"cpu_ratio": {"least": 1.5}}, 1, "cpu_ratio not measured"),
        (
            result_of(peer=None, problem="peer: torch is not installed"),
            {"cpu_ratio": {"least": 1.5}},
            1,
            "torch is not installed",
        ),
    ],
)
def test_check_fails_on_stable_figures_only(result, goal, code, said, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(goals, "load", lambda: {"fake/case": goal})
    file = tmp_path / "bench.json"
    assert runner.conclude([result], PEAKS, [0], file, check=True) == code
    assert said in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["results"][0]["equal"] == result.equal
    assert len(written["goals"]) == 1 + len(goal)
    assert runner.conclude([result], PEAKS, [0], None, check=False) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "tran"], "the nearest is `train` (allowed: train, logp,"),
        (["--suite", "plan", "--json", "no/such/folder/x.json"], "no/such/folder does not exist"),
        (["--suite", "plan", "--episodes", "64"], "--episodes 64: a positive number for the suite `soak` is allowed"),
        (["--suite", "soak", "--episodes", "0"], "--episodes 0: a positive number for the suite `soak` is allowed"),
        (["--quik"], "unknown option `--quik`; the nearest known option is `--quick`"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(arguments, said, capsys):
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert said in shown.err


@pytest.mark.parametrize("quick", [True, False])
def test_cases_have_their_functions_and_goals_their_cases(quick):
    cases = runner.find_cases(runner.SUITES, quick)
    assert {case.name.partition("/")[0] for case in cases} == set(runner.SUITES)
    for case in cases:
        json.dumps(case.arguments)
        assert case.tolerances or not (case.peer and case.timed), "a speed needs its equality"
        for function in filter(None, (case.ours, case.peer)):
            module, _, name = function.partition(":")
            inspect.signature(getattr(importlib.import_module(module), name)).bind(**case.arguments)
    names = {case.name for quick in (True, False) for case in runner.find_cases(runner.SUITES, quick)}
    assert set(goals.load()) <= names
    records = Path(__file__).parents[2] / "docs" / "adr"
    for goal in (goal for figures in goals.load().values() for goal in figures.values() if "adr" in goal):
        assert goal.keys() & {"least", "most"} and "accepted" in goal
        assert len(list(records.glob(f"{goal['adr']:04d}-*.md"))) == 1


def test_only_cases_with_episodes_play_as_many_as_asked_for():
    cases = runner.with_episodes(runner.find_cases(("plan", "soak"), True), 64)
    assert [case.arguments.get("episodes") for case in cases] == [None, 64]
    assert "soak/kills" not in [case.name for case in runner.find_cases((), True)]


def test_figures_named_row_and_column_are_a_table_of_their_own(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    figures = {"bytes": 7.0, "one/seen": 3.0, "one/lost": 0.0, "two/seen": 4.0}
    result = Result(Case("fake/case", "m:ours"), Measured((Sample(1.0, 1.0),), 1e6, figures), None)
    assert table.grid(figures) == {"one": {"seen": 3.0, "lost": 0.0}, "two": {"seen": 4.0}}
    table.show([result], [], PEAKS, [0])
    lines = capsys.readouterr().out.splitlines()
    assert sum("bytes 7" in line for line in lines) == 1
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines]
    assert [row for row in rows if row[0] in ("one", "two")] == [["one", "3", "0"], ["two", "4", "—"]]


def test_no_module_but_the_peer_needs_torch():
    source = "\n".join(
        [
            "import sys",
            "from empo2_jax.bench import runner",
            "runner.find_cases((), True)",
            "print('torch' in sys.modules)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
