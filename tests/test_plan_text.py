"""What `empo2 plan` prints, and the committed table."""

from pathlib import Path

import pytest

from empo2_jax.cli import main
from empo2_jax.config_file import load_config
from empo2_jax.plan_text import lines, preset_lines, table, table_config
from empo2_jax.planning import make_plan

ROOT = Path(__file__).parents[1]
SEVEN = ROOT / "configs" / "scienceworld_qwen2.5_7b.toml"


def test_the_committed_table_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "plan.md").read_text(encoding="utf-8") == table() + "\n"


def test_the_committed_presets_are_the_searched_ones() -> None:
    committed = ROOT / "empo2_jax" / "sharding_presets.toml"
    assert committed.read_text(encoding="utf-8") == "\n".join(preset_lines()) + "\n"


def test_the_table_plans_the_shipped_run() -> None:
    config, row = load_config(SEVEN), table_config("7B")
    for section in ("rollout", "algorithm", "memory"):
        assert getattr(config, section) == getattr(row, section)
    assert config.update.minibatch_steps == row.update.minibatch_steps
    assert config.model.compute_dtype == row.model.compute_dtype


@pytest.mark.parametrize(("name", "chip"), [("", "a100-40"), ("_h100", "h100"), ("_v5p", "v5p")])
def test_documents_have_the_expected_seconds_that_the_command_prints(name: str, chip: str) -> None:
    path = ROOT / "configs" / f"scienceworld_qwen2.5_7b{name}.toml"
    plan = make_plan(load_config(path), chip)
    at_best = plan.model_flops / (plan.share * plan.chip.flops * plan.devices)
    assert plan.rollout is not None
    expected, update, rollout = (f"{value:.0f}" for value in (plan.seconds + plan.rollout, plan.seconds, plan.rollout))
    head = f"expected to take {expected} s: update {update} s (at best {at_best:.0f}), rollout {rollout} s"
    assert head in path.read_text(encoding="utf-8")
    row = f"| {at_best:.0f} to {update} | {plan.sampling:.0f} or more | **{expected}** |"
    assert row in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def test_a_plan_that_fits_says_where_every_byte_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(SEVEN), "--hardware", "a100-40", "--devices", "8", "--formula"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "Qwen2.5-7B, 7,615,616,512 parameters, on 8 × a100-40 (37.25 GiB",
        "arguments      10.641  f32 weights 3.55, moments 7.09, batch",
        "gradients       3.547",
        "upper estimate (a formula's)",
        "all-reduce of activations (tensor)",
        "59.2 s at 40% of the peak",
        "expected 214 s: update 104, rollout 110 (actions and tips at 50% of the bandwidth, "
        "prompts at 40% of the peak, simulators at 17 ms an action); not measured",
    ):
        assert part in shown
    assert shown.endswith("\nfits\n")


@pytest.mark.parametrize(
    ("name", "updates"),
    [
        ("baselines/scienceworld_reflexion", False),
        ("baselines/scienceworld_naive", False),
        ("baselines/scienceworld_retrospex", False),
        ("webshop_qwen2.5_7b", True),  # the time of its simulator was not measured
    ],
)
def test_seconds_are_only_expected_where_they_are_known(name: str, updates: bool) -> None:
    config = load_config(ROOT / "configs" / f"{name}.toml")
    text = "\n".join(lines(make_plan(config, "h200", 8), config))
    assert "expected" not in text
    assert ("this run has no iteration with updates" in text) != updates


def test_a_run_without_memory_writes_no_tips() -> None:
    config = load_config(ROOT / "configs" / "baselines" / "scienceworld_grpo.toml")
    (line,) = (line for line in lines(make_plan(config, "a100-40"), config) if "expected" in line)
    assert "(actions at 50% of the bandwidth, prompts at 40% of the peak, simulators at 17 ms an action)" in line


def test_a_plan_that_does_not_fit_says_what_would() -> None:
    config = load_config(SEVEN, ["model.mesh=[1,1,1]"])
    text = lines(make_plan(config, "a100-40", 4), config)
    hints = text[text.index("DOES NOT FIT") + 1 :]
    assert "  or: 8 devices with model.mesh = [1, 2, 4], in one process" in hints
    assert any(hint.startswith("  or: 4 × h200 with model.mesh = ") for hint in hints)


def test_phases_of_the_engine_are_told() -> None:
    for key, engine, cache in (
        ("rollout.release_memory=true", "f32 weights, given back during updates", "nothing during updates)"),
        ("rollout.max_staleness=1", "f32 weights", "during updates too)"),
    ):
        config = load_config(SEVEN, ["model.mesh=[1,1,1]", "model.path='Qwen/Qwen2.5-0.5B-Instruct'", key])
        text = lines(make_plan(config, "a100-40", 1), config)
        assert any(line.endswith(engine) for line in text) and any(line.endswith(cache) for line in text)
        assert any("new weights" in line for line in text) == ("staleness" in key)


@pytest.mark.parametrize(("tokens", "helps"), [(98_304, True), (131_072, False)])
def test_giving_memory_back_is_a_hint_where_it_helps(tokens: int, helps: bool) -> None:
    small = ["model.mesh=[1,1,1]", "model.path='Qwen/Qwen2.5-1.5B-Instruct'", f"update.micro_batch_tokens={tokens}"]
    config = load_config(SEVEN, small)
    released = config.model_copy(update={"rollout": config.rollout.model_copy(update={"release_memory": True})})
    plan = make_plan(config, "a100-80", 1)
    assert (plan.fits, make_plan(released, "a100-80", 1).fits) == (False, helps)
    assert ("  or: rollout.release_memory = true" in lines(plan, config)) == helps


def test_a_plan_for_servers_says_what_lies_elsewhere() -> None:
    config = load_config(SEVEN, ["rollout.engine='sglang'", "rollout.servers=['http://a']"])
    text = "\n".join(lines(make_plan(config, "a100-40"), config))
    assert "published for servers, bfloat16, GiB" in text and "KV room" not in text and "  engine " not in text
    assert "14.185  a version" in text and "56.741  on the disk: 3 versions" in text  # 2 · 7,615,616,512 bytes
    assert "sampling: the servers' affair" in text and "expected" not in text


def test_more_devices_than_a_machine_has_are_said_to_be_several_processes() -> None:
    config = load_config(ROOT / "configs" / "scienceworld_qwen2.5_32b.toml")
    assert "see --processes 4" in "\n".join(lines(make_plan(config, "h100"), config))
    text = "\n".join(lines(make_plan(config, "h100", processes=4), config))
    assert "on the first device of each process, GiB" in text and "DOES NOT FIT" in text
    served = load_config(
        ROOT / "configs" / "scienceworld_qwen2.5_32b.toml", ["rollout.engine='sglang'", "rollout.servers=['http://a']"]
    )
    assert make_plan(served, "h100", processes=4).fits


def test_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(SEVEN)]) == 2
    assert "plan needs --hardware NAME; allowed: a100-40, a100-80, h100," in capsys.readouterr().err
    assert main(["plan", str(SEVEN), "--hardware", "h100", "--devices", "3", "--model.mesh", "[2,1,1]"]) == 2
    assert "model.mesh = [2, 1, 1] has 2 devices, --devices says 3" in capsys.readouterr().err
    assert main(["plan", "--hardware", "h100"]) == 2
    assert "plan needs CONFIG (or --table)" in capsys.readouterr().err
