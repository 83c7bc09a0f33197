"""The baselines on the real worlds by their shipped files, with a tiny random policy."""

import json
import re
from pathlib import Path

import pytest

from empo2_jax.config import WarmstartConfig
from empo2_jax.envs import scienceworld, webshop
from empo2_jax.metrics import read_jsonl, read_metrics
from empo2_jax.warmstart import random_policy
from tests.fixtures.processes import ROOT, empo2

pytestmark = pytest.mark.slow

SMALL = (
    *(
        "--run.iterations",
        "1",
        "--run.tensorboard",
        "false",
        "--model.compute_dtype",
        "float32",
        "--model.mesh",
        "1,1,1",
    ),
    *("--env.step_limit", "3", "--env.train_variations", "5", "--env.workers", "2"),
    *("--rollout.tasks_per_iteration", "1", "--rollout.group_size", "2", "--rollout.slots", "2"),
    *("--rollout.max_length", "2048", "--rollout.max_action_tokens", "16", "--memory.tip_max_tokens", "16"),
    *("--memory.embedder", "hashing", "--memory.index", "exact"),
    *("--update.buckets", "2048", "--update.micro_batch_tokens", "2048"),
    *("--evaluation.variations", "2", "--evaluation.repeats", "1"),
)
OWN = {
    "naive": ("--run.iterations", "0"),
    "grpo": (),
    "gigpo": (),
    "reflexion": ("--reflexion.trials", "2"),
    "retrospex": (
        *("--retrospex.gold", "2", "--retrospex.updates", "20"),
        *("--warmstart.updates", "2", "--warmstart.demonstrations", "4", "--warmstart.held_out_every", "1"),
    ),
}
WORLDS = {
    "scienceworld": ("--env.tasks", "find-non-living-thing", "--env.simplification", "easy"),
    "webshop": (),
}


def policy(world: str, folder: Path) -> Path:
    """A folder with an untrained model that knows the words of some demonstrations."""
    if world == "webshop":
        family = webshop.family()
    else:
        family = scienceworld.family(tasks=["find-non-living-thing"], variations={"train": 5}, simplification="easy")
    text = " ".join(message.content for chat in family.demonstrations("train", 8, 0) for message in chat).lower()
    family.close()
    words = list(dict.fromkeys(re.findall(r"\w+|[^\w\s]+", text)))
    random_policy(WarmstartConfig(hidden_size=32, num_layers=1, intermediate_size=64), words, 0, folder / "policy")
    return folder / "policy"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("system", OWN)
def test_a_shipped_baseline_runs(world: str, system: str, tmp_path: Path) -> None:
    run_dir, config = tmp_path / "run", ROOT / f"configs/baselines/{world}_{system}.toml"
    options = ("--run.dir", str(run_dir), "--model.path", str(policy(world, tmp_path)))
    done = empo2("train", str(config), *options, *SMALL, *WORLDS[world], *OWN[system])
    assert done.returncode == 0, done.stderr[-2000:]
    assert (run_dir / "report.html").is_file()
    if system in ("naive", "grpo", "gigpo"):
        labels = [line["label"] for line in read_jsonl(run_dir / "evaluations.jsonl")]
        assert labels == (["start"] if system == "naive" else ["start", "end"])
        assert [line["total/tip_calls"] for line in read_metrics(run_dir)] == [0.0] * (len(labels) - 1)
    elif system == "reflexion":
        (record,) = read_jsonl(run_dir / "adaptations.jsonl")
        assert record["complete"] and len(record["score"]) == len(read_metrics(run_dir)) == 2
        trials = [read_jsonl(run_dir / f"episodes/{number}.jsonl") for number in (1, 2)]
        tips = {episode["task"]: episode["tip_written"] for episode in trials[0]}
        assert any(tips.values())
        assert all(tips[episode["task"]] in episode["transcript"] for episode in trials[1])
    else:
        facts = json.loads((run_dir / "critic.json").read_text())
        assert facts["episodes"] == 2 + 2 and facts["transitions"] > 4 and len(facts["losses"]) == 20
        assert json.loads((run_dir / "start/imitation.json").read_text())["held_out"] >= 1
        labels = [line["label"] for line in read_jsonl(run_dir / "evaluations.jsonl")]
        assert labels == ["start", "end"]
