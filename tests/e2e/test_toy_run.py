"""The main job on the toy world, through the command line: what a run leaves, its numbers, its determinism."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import jax.numpy as jnp
import pytest
import torch
from transformers import AutoModelForCausalLM

from empo2_jax import assembly
from empo2_jax.checkpoint import CheckpointStore
from empo2_jax.cli import main
from empo2_jax.metrics import read_jsonl, read_metrics, untimed
from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.ops.losses import policy_loss
from empo2_jax.rollout.sglang import COUNTED
from empo2_jax.types import Message
from tests.fixtures.processes import ROOT, empo2, train_arguments
from tests.fixtures.remote import VENV, sglang_servers

pytestmark = pytest.mark.medium

SECRETS = ("EMPO2_API_KEY", "EMPO2_ADMIN_KEY", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")
GOLDEN = Path(__file__).parent / "golden/toy.json"
PINNED = [
    *("reward/mean", "reward/std", "reward/intrinsic_mean", "episode/score", "episode/length", "episode/valid_actions"),
    *(f"empo2/{mode}/{name}" for mode in ("on", "on_memory", "off") for name in ("reward", "share", "ratio", "masked")),
    *("actor/entropy", "actor/grad_norm", "actor/pg_loss", "actor/updates", "empo2/off/kl_tips_vs_bare"),
    *("memory/size", "memory/hit_rate", "memory/utility", "novelty/distinct_states"),
    *("total/prompt_tokens", "total/sampled_tokens", "val/score"),
]
DOCUMENTED = [
    "reward/mean",
    "reward/std",
    "reward/intrinsic_mean",
    "episode/score",
    "episode/success_rate",
    "episode/length",
    "episode/valid_actions",
    "actor/entropy",
    "actor/grad_norm",
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/kl",
    "actor/updates",
    "actor/skipped_updates",
    "actor/lr",
    "mismatch/kl",
    "mismatch/logprob_abs_diff",
    "mismatch/logprob_abs_diff_max",
    "empo2/on/reward",
    "empo2/on/ratio",
    "empo2/on/clipfrac",
    "empo2/on/masked",
    "empo2/on/ess",
    "memory/size",
    "memory/evictions",
    "memory/hits",
    "memory/hit_rate",
    "novelty/distinct_states",
    "novelty/bonus_mean",
    "timing_s/rollout",
    "timing_s/update",
    "timing_s/iteration",
    "total/environment_steps",
    "total/prompt_tokens",
    "total/tip_calls",
]


def content_hash(run_dir: Path) -> str:
    return CheckpointStore(run_dir, keep=9).content_hash()


def train(run_dir: Path, *more: str) -> Path:
    assert main(train_arguments(run_dir, *more)) == 0
    return run_dir


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    run_dir = tmp_path_factory.mktemp("toy") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name in SECRETS:
            patch.setenv(name, f"s3cret of {name}")
        done = empo2(*train_arguments(run_dir, "--run.tensorboard", "true"))
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir, done


@pytest.fixture(scope="module")
def toy_run(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    return finished[0]


def test_the_run_directory_has_all_that_is_promised(toy_run: Path) -> None:
    files = {path.relative_to(toy_run).as_posix() for path in toy_run.rglob("*") if path.is_file()}
    assert {
        "config.toml",
        "metrics.jsonl",
        "evaluations.jsonl",
        "report.html",
        "episodes/1.jsonl",
        "episodes/2.jsonl",
        *(f"checkpoints/{step}/{name}" for step in (0, 1, 2) for name in ("manifest.json", "cursor.json")),
    } <= files
    for folder in ("tensorboard", "checkpoints/2/state", "checkpoints/2/memory", "checkpoints/2/novelty"):
        assert any(name.startswith(f"{folder}/") for name in files), folder
    assert not [name for name in files if ".tmp" in name or ".start-" in name]
    assert [record["label"] for record in read_jsonl(toy_run / "evaluations.jsonl")] == ["start", "end"]
    assert len(read_jsonl(toy_run / "episodes/1.jsonl")) == 16


def test_a_run_directory_and_what_is_said_hold_no_secret(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = finished
    assert "s3cret" not in done.stdout + done.stderr
    assert not [path for path in run_dir.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]


def test_progress_is_a_line_per_iteration_and_the_report_is_named(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = finished
    assert done.stdout == f"report: {run_dir / 'report.html'}\n"
    shown = [line.split(" · ")[0] for line in done.stderr.splitlines() if line.startswith("iteration")]
    assert shown == ["iteration 1/2", "iteration 2/2"]


def test_metrics_are_named_as_documented_and_finite(toy_run: Path) -> None:
    records = read_metrics(toy_run)
    assert [record["iteration"] for record in records] == [1, 2]
    for record in records:
        assert not [name for name in DOCUMENTED if name not in record]
        assert not [name for name, value in record.items() if isinstance(value, str)], "NaN or infinity"
    guide = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    named = {name for record in records for name in record} | {f"engine/{name}" for name in COUNTED}  # of servers
    assert not set(re.findall(r"`([a-z_]+/[a-z_0-9/]+)`", guide)) - named
    assert {"val/score", "val/success_rate"} <= records[-1].keys()
    assert max(record["actor/grad_norm"] for record in records) > 0, "nothing was learned from"


def test_engine_and_trainer_agree_and_the_first_ratio_is_one(toy_run: Path) -> None:
    for record in read_metrics(toy_run):
        assert record["mismatch/logprob_abs_diff_max"] <= 1e-5
        assert record["actor/updates"] == 1, "the ratios below are those of a first mini-batch"
        ratios = [value for name, value in record.items() if name.startswith("empo2/") and name.endswith("/ratio")]
        assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-6)  # forward and gradient are two programs
        assert record["actor/pg_clipfrac"] == 0


def test_same_seed_same_run_in_another_process_and_other_seed_another(toy_run: Path, tmp_path: Path) -> None:
    again = train(tmp_path / "again", "--rollout.release_memory", "true")  # which changes no bit either
    assert untimed(read_metrics(again)) == untimed(read_metrics(toy_run))
    assert content_hash(again) == content_hash(toy_run)
    for name in ("evaluations.jsonl", "episodes/1.jsonl", "episodes/2.jsonl"):
        assert (again / name).read_bytes() == (toy_run / name).read_bytes(), name
    other = train(tmp_path / "other", "--run.seed", "1", "--run.iterations", "1")
    assert untimed(read_metrics(other))[0] != untimed(read_metrics(toy_run))[0]
    assert CheckpointStore(other, keep=9).content_hash(1) != CheckpointStore(toy_run, keep=9).content_hash(1)


def test_empo2_without_memory_and_novelty_is_grpo_bit_for_bit(tmp_path: Path) -> None:
    # The entropy bonus has a gradient even when no episode of the few finds the bulb.
    options = ("--algorithm.p_memory", "0", "--intrinsic.kind", "none", "--algorithm.entropy_coefficient", "0.01")
    options += ("--env.step_limit", "6")
    empo2_run = train(tmp_path / "empo2", *options)
    grpo_run = train(tmp_path / "grpo", *options, "--algorithm.name", "grpo")
    assert untimed(read_metrics(empo2_run)) == untimed(read_metrics(grpo_run))
    assert content_hash(empo2_run) == content_hash(grpo_run)
    assert max(record["actor/grad_norm"] for record in read_metrics(grpo_run)) > 0, "nothing was learned from"


def test_gigpo_without_step_weight_is_grpo_bit_for_bit_and_with_it_another(tmp_path: Path) -> None:
    options = ("--algorithm.p_memory", "0", "--intrinsic.kind", "none", "--run.iterations", "1")
    options += ("--env.step_limit", "6", "--rollout.temperature", "1.6")  # two of the few episodes find a bulb
    grpo_run = train(tmp_path / "grpo", *options, "--algorithm.name", "grpo")
    (record,) = read_metrics(grpo_run)
    assert record["reward/std"] > 0 and record["actor/grad_norm"] > 0, "nothing was learned from"
    options += ("--algorithm.name", "gigpo")
    plain = train(tmp_path / "plain", *options, "--algorithm.step_weight", "0")
    assert untimed(read_metrics(plain)) == untimed(read_metrics(grpo_run))
    assert content_hash(plain) == content_hash(grpo_run)
    weighted = train(tmp_path / "weighted", *options)
    (other,) = read_metrics(weighted)
    assert other["group/shared_states"] == record["group/shared_states"] > 0.25  # all begin alike
    assert other["actor/grad_norm"] != record["actor/grad_norm"] and content_hash(weighted) != content_hash(grpo_run)


def test_17_adaptation_is_labeled_and_changes_nothing_of_the_run(
    toy_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(toy_run, run_dir)
    before = {path: path.read_bytes() for path in sorted(run_dir.rglob("*")) if path.is_file()}
    hashed = content_hash(run_dir)  # parameters, optimizer, memory, novelty, metrics
    assert main(["adapt", str(run_dir), "--trials", "3"]) == 0
    (record,) = read_jsonl(run_dir / "adaptations.jsonl")
    assert record["label"] == "test-time adaptation (sees test rewards)"
    assert record["label"] in " ".join(capsys.readouterr().out.split())
    assert (record["iteration"], record["memory"], record["complete"]) == (2, "empty", True)
    assert [len(row["scores"]) for row in record["rows"]] == [3] * 4
    assert len(record["best_score"]) == 3 and record["best_score"] == sorted(record["best_score"])
    assert record["best_score"][0] == record["score"][0] and record["best_score"][-1] >= max(record["score"])
    assert content_hash(run_dir) == hashed
    changed = [path.name for path, content in before.items() if path.read_bytes() != content]
    assert changed == ["report.html"]
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert f">{record['label']}</h2>" in page

    assert main(["adapt", str(run_dir), "--trials", "3"]) == 0
    assert main(["adapt", str(run_dir), "--trials", "1", "--keep-memory", "--split", "train", "--step", "1"]) == 0
    panel = tmp_path / "unseen.toml"  # houses that the run was not trained on
    panel.write_text('env = "toy"\nsplit = "test"\nrepeats = 1\ntemperature = 0.4\nseed = 0\n[tasks]\nbulb = [6, 7]\n')
    assert main(["adapt", str(run_dir), "--trials", "2", "--panel", str(panel)]) == 0
    assert main(["adapt", str(run_dir), "--panel", str(panel), "--split", "dev"]) == 2
    assert "fixes split and tasks" in capsys.readouterr().err
    _, again, kept, unseen = read_jsonl(run_dir / "adaptations.jsonl")
    assert again == record  # an empty memory each time, the same draws
    assert (kept["iteration"], kept["memory"], kept["split"]) == (1, "run", "train")
    assert [(row["variation"], len(row["scores"])) for row in unseen["rows"]] == [(6, 2), (7, 2)]
    assert [bool(row["tips_shown"][1]) for row in unseen["rows"]] == [
        bool(row["tips_written"][0]) for row in unseen["rows"]
    ]


def test_tips_in_the_newest_turn_alone_learn_on_branches_and_resume_bit_for_bit(tmp_path: Path) -> None:
    options = ("--memory.placement", "latest", "--algorithm.p_memory", "0.8", "--rollout.group_size", "8")
    whole = train(tmp_path / "whole", *options)
    _, second = read_metrics(whole)
    assert second["mismatch/logprob_abs_diff_max"] <= 1e-5
    for mode in ("on_memory", "off"):
        assert second[f"empo2/{mode}/ratio"] == pytest.approx(1.0, abs=1e-6)
        assert abs(second[f"empo2/{mode}/kl_tips_vs_bare"]) > 1e-3
    parts = train(tmp_path / "parts", *options, "--run.iterations", "1")
    # without tips so far, the placement made no difference
    history = train(tmp_path / "history", *options, "--run.iterations", "1", "--memory.placement", "history")
    assert untimed(read_metrics(history)) == untimed(read_metrics(parts))
    assert content_hash(history) == content_hash(parts)
    before = content_hash(whole)
    train(whole, *options, "--resume", str(whole / "checkpoints/1"))
    assert content_hash(whole) == before


def test_commands_on_the_finished_run(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def output(*arguments: str) -> str:
        assert main(arguments) == 0
        return capsys.readouterr().out

    assert output("checkpoint", "hash", str(toy_run)).strip() == content_hash(toy_run)
    assert output("checkpoint", "verify", str(toy_run)) == "0: good\n1: good\n2: good\n"
    size = int(read_metrics(toy_run)[-1]["memory/size"])
    assert output("memory", "inspect", str(toy_run), "--limit", "1").startswith(f"{size} tips in ")
    assert "checkpoint 2" in output("evaluate", str(toy_run), "--repeats", "1")
    (toy_run / "report.html").unlink()
    assert output("report", str(toy_run)).strip() == str(toy_run / "report.html")
    page = (toy_run / "report.html").read_text(encoding="utf-8")
    assert "Map of the states" in page and "Entries of the memory" in page and "passed over" not in page


def test_a_run_that_diverges_ends_with_one_line_and_unharmed_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def poisoned(*batch: Any, **settings: Any) -> Any:
        loss, sums = policy_loss(*batch, **settings)
        return loss * jnp.nan, sums

    monkeypatch.setattr(assembly, "policy_loss", poisoned)
    assert main(train_arguments(tmp_path / "run", "--update.minibatch_steps", "12")) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said.startswith("error: iteration 1, update 3: the loss or the gradient is not finite, 3 updates in a row; ")
    assert [record.message[:22] for record in caplog.records] == ["iteration 1, update 1:", "iteration 1, update 2:"]
    assert CheckpointStore(tmp_path / "run", keep=9).verify() == [(0, None)]


def test_golden_numbers(tmp_path: Path) -> None:
    """Re-record after a deliberate change: `EMPO2_RECORD_GOLDEN=1 python -m pytest tests/e2e -k golden`."""
    options = ["--run.iterations", "3", "--rollout.group_size", "8", "--algorithm.p_memory", "0.5"]
    options += ["--update.minibatch_steps", "32"]  # so that ratios leave 1
    records = read_metrics(train(tmp_path / "run", *options))
    found = [{name: record[name] for name in PINNED if name in record} for record in records]
    assert any(record["actor/grad_norm"] > 0 and record["reward/std"] > 0 for record in found), "pins nothing"
    if os.environ.get("EMPO2_RECORD_GOLDEN"):
        golden = {"what": "The run of test_golden_numbers, seed 0", "options": options, "iterations": found}
        GOLDEN.write_text(json.dumps(golden, indent=2) + "\n", encoding="utf-8")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden["options"] == options
    for record, expected in zip(found, golden["iterations"], strict=True):
        assert record == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_fork_trains_on_with_its_keys_changed(toy_run: Path, tmp_path: Path) -> None:
    fork, again = tmp_path / "fork", tmp_path / "again"
    assert main([*train_arguments(again), "--from", f"{toy_run}@1"]) == 0
    assert content_hash(again) == content_hash(toy_run), "a fork without changes is the run"
    changed = [*train_arguments(fork), "--from", f"{toy_run}@1", "--update.learning_rate", "1e-3", "--resume", "never"]
    assert main(changed) == 0
    assert main(changed) == 2  # the fork is there now
    assert content_hash(fork) != content_hash(toy_run)
    first, second = read_metrics(fork)
    assert untimed([first]) == untimed(read_metrics(toy_run)[:1]) and second["actor/lr"] == 1e-3
    assert "run@1: update.learning_rate 0.0003 → 0.001" in (fork / "report.html").read_text()
    page = tmp_path / "both.html"
    assert main(["report", str(toy_run), str(fork), "--out", str(page)]) == 0
    assert "<td>update.learning_rate</td><td>0.0003</td><td>0.001</td>" in page.read_text()


def test_the_exported_policy_answers_as_the_readme_says(
    toy_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy"
    assert main(["convert", "to-hf", str(toy_run), str(policy)]) == 0
    tips = read_jsonl(policy / "memory/tips.jsonl")
    assert tips == read_jsonl(toy_run / "checkpoints/2/memory/tips.jsonl") and len(tips) > 1
    capsys.readouterr()
    check = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    assert len(check.split("\n\n")[-1].splitlines()) == 4  # and the import
    names: dict[str, Any] = {}
    exec(compile(check.replace('"policy"', repr(str(policy))), "README.md", "exec"), names)
    ours = Tokenizer.load(policy)
    ids = ours.encode(ours.chat_text([Message("user", "look around")], add_generation_prompt=True))
    assert names["prompt"]["input_ids"][0].tolist() == ids
    asked = names["tokenizer"].decode(names["prompt"]["input_ids"][0])
    answered = capsys.readouterr().out.strip()
    assert answered.startswith(asked) and len(answered) > len(asked) > 0


@pytest.mark.slow
@pytest.mark.skipif(not (VENV / "bin/python").is_file(), reason="no SGLang; bash launch/sglang_cpu.sh makes one")
def test_sglang_answers_an_exported_policy_as_transformers_does(toy_run: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    assert main(["convert", "to-hf", str(toy_run), str(policy)]) == 0
    ids = Tokenizer.load(policy).encode("look in the kitchen")
    asked = {"input_ids": ids, "sampling_params": {"max_new_tokens": 16, "temperature": 0.0}}
    with sglang_servers(tmp_path, 1, {}, policy) as (url,):
        answered = httpx.post(f"{url}/generate", json=asked, timeout=60, trust_env=False).json()
    model = AutoModelForCausalLM.from_pretrained(policy)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0]
    assert answered["output_ids"] == expected[len(ids) :].tolist() and len(ids) == 4


def test_random_distillation_resumes_bit_for_bit(tmp_path: Path) -> None:
    novelty = ("--intrinsic.kind", "rnd", "--intrinsic.coefficient", "5.0", "--evaluation.every", "1")
    whole = train(tmp_path / "whole", *novelty)
    train(tmp_path / "cut", *novelty, "--run.iterations", "1")
    assert content_hash(train(tmp_path / "cut", *novelty)) == content_hash(whole)
    first, second = read_metrics(whole)
    assert 2.0 < first["novelty/bonus_mean"] < 10.0  # untrained: about the coefficient
    assert second["novelty/bonus_mean"] < first["novelty/bonus_mean"]
    assert second["novelty/states"] == second["total/environment_steps"]
