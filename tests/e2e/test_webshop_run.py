"""One iteration of the shipped WebShop configuration through the command line, with a tiny random policy."""

import json
import re
from pathlib import Path

import pytest

from empo2_jax.config import WarmstartConfig
from empo2_jax.envs import webshop
from empo2_jax.metrics import read_jsonl, read_metrics
from empo2_jax.warmstart import random_policy
from tests.fixtures.processes import ROOT, empo2

SMALL = (
    *("--run.iterations", "1", "--run.tensorboard", "false", "--env.step_limit", "3", "--evaluation.variations", "2"),
    *("--warmstart.updates", "3", "--warmstart.demonstrations", "4", "--memory.embedder", "hashing"),
    *("--memory.index", "exact", "--rollout.max_length", "2048", "--rollout.group_size", "2"),
    *("--update.buckets", "2048"),
)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A folder with an untrained model that knows the words of some demonstrations."""
    chats = webshop.family().demonstrations("train", 40, 0)
    text = " ".join(message.content for chat in chats for message in chat).lower()
    words = list(dict.fromkeys(re.findall(r"\w+|[^\w\s]+", text)))
    random_policy(WarmstartConfig(hidden_size=32, num_layers=1, intermediate_size=64), words, 0, tmp_path / "policy")
    return tmp_path / "policy"


@pytest.mark.slow
def test_one_iteration_of_the_shipped_configuration(policy: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = str(ROOT / "configs" / "webshop.toml")
    done = empo2("train", config, "--run.dir", str(run_dir), "--model.path", str(policy), *SMALL)
    assert done.returncode == 0, done.stderr[-2000:]
    (record,) = read_metrics(run_dir)
    assert record["actor/updates"] >= 1
    assert 0.0 <= record["episode/score"] <= 100.0
    evaluations = list(read_jsonl(run_dir / "evaluations.jsonl"))
    assert evaluations and all(row["task"] == "human" for row in evaluations[-1]["rows"])
    episodes = [json.loads(line) for line in (run_dir / "episodes" / "1.jsonl").read_text().splitlines()]
    assert len(episodes) == 4
    assert all(episode["steps"][0]["observation"].startswith("Search\nPossible actions:") for episode in episodes)
