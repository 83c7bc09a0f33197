"""`empo2 envs check` finds what is off."""

import sys
from pathlib import Path

import pytest

from empo2_jax.cli import main
from empo2_jax.config import EnvConfig
from empo2_jax.envs.check import check
from empo2_jax.envs.scienceworld_tasks import TASKS
from empo2_jax.types import Task

BROKEN = """
import os
from empo2_jax.envs.toy import ToyFamily, ToyHouse

class House(ToyHouse):
    def step(self, action):
        seen = super().step(action)
        return type(seen)(**{**vars(seen), "text": f"process {os.getpid()}"})

class Family(ToyFamily):
    def __init__(self, kind): super().__init__(range(1)); self.kind = kind
    def make(self): return House() if self.kind == "random" else ToyHouse()
    def solution(self, task): return {"short": ["sing"], "none": []}.get(self.kind, super().solution(task))

def from_config(config, *, panel, workers): return Family(config.tasks[0])

def about_data(config): return ["a house"]

def package_scores(config, problems):
    for _, actions in problems:
        yield [50.0] * len(actions)
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "brokenworlds").mkdir()
    (tmp_path / "brokenworlds" / "__init__.py").touch()
    (tmp_path / "brokenworlds" / "house.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    yield "brokenworlds.house"
    for name in ("brokenworlds", "brokenworlds.house"):
        sys.modules.pop(name, None)


def test_the_toy_world_is_good_in_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "check", "toy"]) == 0
    shown = capsys.readouterr().out
    assert "toy/bulb/0" in shown and "good" in shown and "yes" in shown
    assert check(EnvConfig(name="toy"), processes=1).rows[0].task == str(Task("toy", "bulb", 0))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("random", "2 transcripts in 2 processes"),
        ("short", "the solution ends at 0 of 100 points"),
        ("none", "no solution is known"),
    ],
)
def test_what_is_off_is_named_and_the_exit_code_is_1(broken: str, kind: str, problem: str) -> None:
    report = check(EnvConfig(name=broken, tasks=(kind,)), processes=2)
    assert not report.good and report.rows[0].problem == problem


def test_a_score_that_is_not_the_packages_is_named_with_its_action(broken: str) -> None:
    report = check(EnvConfig(name=broken, tasks=("whole",)), processes=1, package=True)
    (row,) = report.rows
    assert (row.score, row.problem) == (100.0, "other scores than the package's")
    assert row.package.startswith("50, ours ")
    assert report.notes[-1] == "a house"


def test_a_world_without_a_package_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "check", "toy", "--package"]) == 2
    assert "--package: toy has no client of its own" in capsys.readouterr().err


@pytest.mark.slow
def test_the_gold_paths_of_all_30_tasks_reach_100_with_the_packages_scores_and_agree_over_processes() -> None:
    names = tuple(task.name for task in TASKS)
    config = EnvConfig(name="scienceworld", tasks=names, simplification="easy", deterministic=True, train_variations=1)
    report = check(config, processes=2, package=True)
    assert [row.task for row in report.rows] == [f"scienceworld/{name}/0" for name in names]
    assert {(row.score, row.same, row.package) for row in report.rows} == {(100.0, "yes", "equal")}
