"""Every baseline on every world resolves to a plan, without running anything."""

from pathlib import Path

import pytest

from empo2_jax import dry_run
from empo2_jax.config_file import load_config

ROOT = Path(__file__).parents[1]
BASELINES = sorted(ROOT.glob("configs/baselines/*.toml"))
SYSTEMS = {"naive", "reflexion", "grpo", "gigpo"}


@pytest.mark.parametrize("path", BASELINES, ids=lambda path: path.stem)
def test_a_baseline_has_a_plan(path: Path) -> None:
    config = load_config(path)
    world, _, system = path.stem.partition("_")
    assert (config.env.name, config.run.name) == (world, path.stem)
    assert config.algorithm.p_memory == 0 and config.intrinsic.kind == "none"
    plan = dry_run.lines(config)
    told = "10 trials at most" if system == "reflexion" else f"{config.run.iterations} iterations"
    assert plan[0].startswith("# plan: " + told)
    assert (config.run.iterations == 0) == (system == "naive") or system == "reflexion"


def test_every_system_has_every_world() -> None:
    names = {path.stem for path in BASELINES}
    assert names == {f"{world}_{system}" for world in ("toy", "scienceworld", "webshop") for system in SYSTEMS}
