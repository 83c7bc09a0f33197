"""The shipped ablations run on the real worlds, with a policy that learned next to nothing."""

from pathlib import Path

import pytest

from empo2_jax.cli import main
from empo2_jax.study.base import load_study
from empo2_jax.study.results import read_results
from tests.fixtures.processes import ROOT

pytestmark = pytest.mark.slow

STUDY = """
extends = "{root}/configs/studies/ablations_{world}.toml"
seeds = 1
[arms.retrospex]
run.iterations = 1
retrospex = {{ gold = 2, updates = 20 }}
[common]
run.iterations = 2
env = {{ step_limit = 3, train_variations = 2, workers = 1 }}
rollout = {{ tasks_per_iteration = 2, group_size = 4, slots = 8 }}
evaluation = {{ every = 0, variations = 2 }}
warmstart = {{ updates = 20, demonstrations = 8, batch_episodes = 2 }}
reflexion.trials = 2
"""
WITHOUT_TIPS = {"grpo", "gigpo", "gigpo_without_std", "naive", "retrospex"}


@pytest.mark.parametrize("world", ["scienceworld", "webshop"])
def test_every_system_and_kind_of_ablation_runs(world: str, tmp_path: Path) -> None:
    path = tmp_path / f"{world}.toml"
    path.write_text(STUDY.format(root=ROOT, world=world), encoding="utf-8")
    arms = [name for name in load_study(path).arms if not name.startswith(("p_", "q_"))]  # `no_…` are their ends
    asked = ["study", str(path), "--out", str(tmp_path / "out"), "--jobs", "1", "--arms", ",".join(arms)]
    assert main(asked) == 1  # one seed has no interval
    results = read_results(tmp_path / "out" / world / "results.json")
    assert results.failed == [] and [row["arm"] for row in results.rows] == arms
    assert {row["arm"] for row in results.rows if not row["tip_calls"]} == WITHOUT_TIPS
    assert {row["arm"] for row in results.rows if not row["training"]} == {"naive"}
