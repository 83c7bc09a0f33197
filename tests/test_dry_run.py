"""Every baseline on every world, and every ablation, resolves to a plan without running anything."""

from pathlib import Path

import pytest

from empo2_jax import dry_run
from empo2_jax.config_file import load_config
from empo2_jax.study.base import load_study

ROOT = Path(__file__).parents[1]
BASELINES = sorted(ROOT.glob("configs/baselines/*.toml"))
SYSTEMS = {"naive", "reflexion", "retrospex", "grpo", "gigpo"}


@pytest.mark.parametrize("path", BASELINES, ids=lambda path: path.stem)
def test_a_baseline_has_a_plan(path: Path) -> None:
    config = load_config(path)
    world, _, system = path.stem.partition("_")
    assert (config.env.name, config.run.name) == (world, path.stem)
    assert config.algorithm.p_memory == 0 and config.intrinsic.kind == "none"
    plan = dry_run.lines(config)
    told = "10 trials at most" if system == "reflexion" else f"{config.run.iterations} iterations"
    assert plan[0].startswith("# plan: " + told)
    assert any("no update of the policy" in line for line in plan) == (system in ("reflexion", "retrospex"))
    assert (config.run.iterations == 0) == (system == "naive") or system == "reflexion"


def test_every_system_has_every_world() -> None:
    names = {path.stem for path in BASELINES}
    assert names == {f"{world}_{system}" for world in ("toy", "scienceworld", "webshop") for system in SYSTEMS}


ABLATIONS = load_study(ROOT / "configs/studies/ablations.toml")
WORLDS = [ROOT / f"configs/{name}.toml" for name in ("toy", "scienceworld_qwen2.5_7b", "webshop_qwen2.5_7b")]


@pytest.mark.parametrize("arm", ABLATIONS.arms)
def test_an_ablation_resolves_on_every_world(arm: str) -> None:
    configs = [load_config(world, ABLATIONS.arms[arm].overrides) for world in WORLDS]
    assert all(dry_run.lines(config)[0].startswith("# plan: ") for config in configs[:1])
    assert len({config.algorithm.p_memory for config in configs}) == 1


def test_ablations_are_those_of_the_paper() -> None:
    found = {name: arm.config(0) for name, arm in ABLATIONS.arms.items()}
    p = {config.algorithm.p_memory for name, config in found.items() if name.startswith("p_")}
    q = {config.algorithm.q_off_policy for name, config in found.items() if name.startswith("q_")}
    assert (p, q) == ({0.1, 0.25, 0.4, 0.7}, {0.3, 0.5, 0.67, 0.85, 0.95})
    novelty = [(found[f"intrinsic_{name}"].intrinsic) for name in ("0", "half", "1", "2", "rnd")]
    assert [(item.kind, item.coefficient) for item in novelty[1:]] == [
        ("count", 0.5),
        ("count", 1.0),
        ("count", 2.0),
        ("rnd", 1.0),
    ]
    assert novelty[0].kind == "none"
    modes = {name: dry_run.lines(found[name])[4] for name in ("no_off_policy", "no_on_policy_with_memory")}
    assert modes["no_off_policy"].endswith("0.250 on-policy with memory, 0.000 off-policy")
    assert modes["no_on_policy_with_memory"].endswith("0.000 on-policy with memory, 0.250 off-policy")
    assert found["mask_off"].algorithm.min_token_prob == 0
