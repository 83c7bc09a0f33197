"""The two small worlds that studies are made of, cut to one update of everything: shared start, tips, panel, row."""

from pathlib import Path

import pytest

from empo2_jax.metrics import read_jsonl
from empo2_jax.study.results import RESULTS_FILE, read_results
from tests.fixtures.processes import ROOT, empo2

CUT = """
[common]
run.iterations = 1
rollout = {{ tasks_per_iteration = 1, group_size = 2, slots = 2 }}
evaluation = {{ variations = 2, repeats = 1 }}
warmstart = {{ updates = 3, demonstrations = 4, variations = {variations}, hidden_size = 16, intermediate_size = 16 }}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("study", "variations"), [("webshop", 20), ("scienceworld", 14)])
def test_a_study_runs_through_from_one_start(study: str, variations: int, tmp_path: Path) -> None:
    text = (ROOT / f"configs/studies/{study}.toml").read_text()
    text = text.replace('base = "../', f'base = "{ROOT}/configs/').replace("seeds = 3", "seeds = 1")
    path = tmp_path / f"{study}.toml"
    path.write_text(text.replace("[arms.empo2]", CUT.format(variations=variations) + "[arms.empo2]", 1))
    done = empo2("study", str(path), "--out", str(tmp_path), "--jobs", "1", "--arms", "empo2,grpo")
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: nothing learned
    results = read_results(tmp_path / study / RESULTS_FILE)
    assert [row["arm"] for row in results.rows] == ["empo2", "grpo"]
    assert [row["tip_calls"] for row in results.rows] == [2.0, 0.0]
    assert len([folder for folder in (tmp_path / study / "starts").iterdir() if folder.is_dir()]) == 1
    starts = [read_jsonl(tmp_path / study / arm / "seed0/evaluations.jsonl")[0]["score"] for arm in ("empo2", "grpo")]
    assert starts[0] == starts[1]
