"""A toy run with adapters through the command line: exact resume, export for PEFT and merged, another base refused."""

import json
import shutil
from pathlib import Path

import chex
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from empo2_jax.assets import toy_start
from empo2_jax.checkpoint import CheckpointStore
from empo2_jax.cli import main
from empo2_jax.metrics import read_metrics, untimed
from empo2_jax.trained import load_trained
from tests.fixtures.processes import train_arguments

pytestmark = [
    pytest.mark.medium,
    # PEFT asks the model by a name that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def arguments(run_dir: Path, base: Path, *more: str) -> list[str]:
    options = (
        "--lora.enabled",
        "true",
        "--lora.rank",
        "4",
        "--update.learning_rate",
        "0.01",
        "--model.path",
        str(base),
    )
    # The entropy bonus has a gradient even when no episode of the few finds the bulb.
    options += ("--algorithm.entropy_coefficient", "0.01", "--algorithm.kl_coefficient", "0.01")
    options += ("--run.updates_kept", "1")
    return train_arguments(run_dir, *options, *more)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the toy's start."""
    return Path(shutil.copytree(toy_start(), tmp_path_factory.mktemp("base") / "model"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("toy") / "run"
    assert main(arguments(run_dir, base)) == 0
    return run_dir


def test_a_resumed_run_is_the_uninterrupted_one(run: Path, base: Path, tmp_path: Path) -> None:
    cut = Path(shutil.copytree(run, tmp_path / "cut"))
    assert main(arguments(cut, base, "--resume", str(cut / "checkpoints" / "1"))) == 0
    assert untimed(read_metrics(cut)) == untimed(read_metrics(run))
    hashes = [CheckpointStore(path, keep=9).content_hash() for path in (run, cut)]
    assert hashes[0] == hashes[1]
    records = read_metrics(cut)
    assert max(record["actor/grad_norm"] for record in records) > 0
    assert max(record["mismatch/logprob_abs_diff_max"] for record in records) <= 1e-5, "the engine's weights are merged"


def test_exports_are_one_policy_in_two_forms(run: Path, base: Path, tmp_path: Path) -> None:
    merged_folder, adapter_folder = tmp_path / "merged", tmp_path / "adapter"
    assert main(["convert", "to-hf", str(run), str(merged_folder)]) == 0
    assert main(["convert", "to-hf", str(run), str(adapter_folder), "--adapter"]) == 0
    config = json.loads((adapter_folder / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(base.resolve()))
    before, after = (load_file(folder / "model.safetensors") for folder in (base, merged_folder))
    changed = {name for name, tensor in after.items() if not np.array_equal(tensor, before[name])}
    assert changed == {name for name in after if name.endswith("proj.weight")}
    policy, step = load_trained(run)
    assert step == 2
    np.testing.assert_array_equal(
        policy.model.layers[0].mlp.up_proj.weight[...], after["model.layers.0.mlp.up_proj.weight"]
    )
    ids = torch.arange(20)[None] % policy.model.config.vocab_size
    with torch.no_grad():
        plain = transformers.Qwen2ForCausalLM.from_pretrained(base)
        start = plain(ids).logits
        wanted = transformers.Qwen2ForCausalLM.from_pretrained(merged_folder)(ids).logits
        found = peft.PeftModel.from_pretrained(plain, adapter_folder)(ids).logits
    assert (wanted - start).abs().max() > 1e-2, "something was learned"
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


def test_another_base_is_refused(run: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = base / "model.safetensors"
    original = load_file(weights)
    name = "model.layers.0.mlp.up_proj.weight"
    try:
        save_file({**original, name: original[name] + np.float32(1e-3)}, weights, metadata={"format": "pt"})
        for command in (
            ["evaluate", str(run)],
            arguments(run, base),
            ["convert", "to-hf", str(run), str(tmp_path / "x")],
            ["debug", str(run), "--iteration", "2"],
        ):
            assert main(command) == 2
            said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
            assert said == [f"error: {run}: its adapter belongs to other weights than those in {base}; restore these"]
    finally:
        save_file(original, weights, metadata={"format": "pt"})
    chex.assert_trees_all_equal(load_file(weights), original)
    assert main(["evaluate", str(run), "--repeats", "1"]) == 0
    assert main(arguments(run, base, "--lora.rank", "8")) == 2
    assert "lora.rank = 4, now it is 8" in capsys.readouterr().err
