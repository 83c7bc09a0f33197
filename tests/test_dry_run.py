"""Every baseline on every world, and every ablation, resolves to a plan without running anything.

`empo2 train --dry-run` refuses what the run would, in one line, and needs neither weights nor an accelerator.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from empo2_jax import dry_run
from empo2_jax.assets import toy_start
from empo2_jax.cli import main
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
    assert any(" on test every " in line for line in plan) == (system not in ("reflexion", "retrospex"))
    assert any("without the critic and with it" in line for line in plan) == (system == "retrospex")
    assert (config.run.iterations == 0) == (system == "naive") or system == "reflexion"


def test_every_system_has_every_world() -> None:
    names = {path.stem for path in BASELINES}
    assert names == {f"{world}_{system}" for world in ("toy", "scienceworld", "webshop") for system in SYSTEMS}


STUDIES = {
    world: load_study(ROOT / f"configs/studies/ablations{suffix}.toml")
    for world, suffix in (("toy", ""), ("scienceworld", "_scienceworld"), ("webshop", "_webshop"))
}
ABLATIONS = STUDIES["toy"]


@pytest.mark.parametrize("world", STUDIES)
def test_every_system_and_ablation_has_a_plan_on_every_world(world: str) -> None:
    study = STUDIES[world]
    assert list(study.arms) == list(ABLATIONS.arms) and study.seeds >= 3
    for name, arm in study.arms.items():
        config = arm.config(0)
        assert config.env.name == world
        assert dry_run.lines(config)[0].startswith("# plan: "), name
    names = {config.algorithm.name for config in (arm.config(0) for arm in study.arms.values())}
    assert names == {"empo2", "grpo", "gigpo", "reflexion", "retrospex"}


@pytest.mark.parametrize("world", ["scienceworld", "webshop"])
@pytest.mark.parametrize("system", ["reflexion", "retrospex"])
def test_a_system_that_updates_nothing_is_in_a_study_what_its_own_file_says(world: str, system: str) -> None:
    arm, own = STUDIES[world].arms[system].config(0), load_config(ROOT / f"configs/baselines/{world}_{system}.toml")
    assert (arm.reflexion, arm.retrospex, arm.intrinsic.kind) == (own.reflexion, own.retrospex, own.intrinsic.kind)
    assert (arm.algorithm.name, arm.algorithm.p_memory) == (own.algorithm.name, own.algorithm.p_memory)
    assert arm.run.iterations == own.run.iterations or system == "reflexion"


@pytest.mark.parametrize("world", ["scienceworld", "webshop"])
def test_the_ablations_of_a_world_with_the_papers_model(world: str, tmp_path: Path) -> None:
    base, own = (ROOT / f"configs/{name}.toml" for name in (f"{world}_qwen2.5_7b", f"baselines/{world}_retrospex"))
    file = tmp_path / "large.toml"
    file.write_text(f"""extends = "{ROOT}/configs/studies/ablations_{world}.toml"
base = "{base}"
[arms.retrospex]
base = "{own}"
""")
    arms = {name: arm.config(0) for name, arm in load_study(file).arms.items()}
    assert list(arms) == list(ABLATIONS.arms)
    assert {(config.model.path, config.env) for config in arms.values()} == {
        (load_config(base).model.path, load_config(base).env)
    }
    imitation = load_config(own).warmstart
    assert arms["retrospex"].warmstart == imitation and imitation.updates == 300


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


TOY = ROOT / "configs" / "toy.toml"

FULL_SCALE = """
from pathlib import Path
from empo2_jax import dry_run
from empo2_jax.config_file import load_config

for path in sorted(Path("configs").glob("*qwen2.5*.toml")):
    config = load_config(path)
    dry_run.refuse(config)
    print(path.stem, *dry_run.lines(config)[2].split()[1:6])
"""


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["train", str(TOY), *options, "--dry-run"]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert shown.out == "" and line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model.path", "/nowhere/at/all"), "model.path = '/nowhere/at/all': no such folder"),
        (("--model.mesh", "[1,1,64]"), "needs 64 devices; there are 1"),
        (("--rollout.engine", "sglang", "--rollout.servers", "missing.txt"), "neither a URL nor a file with URLs"),
        (("--rollout.max_length", "384", "--memory.tip_max_tokens", "9000"), "exceeds the"),
        (("--model.attention", "cudnn"), "model.attention"),
        (("--num-processes", "2"), "--num-processes without --coordinator and --process-id: all three"),
        (("--coordinator", "h:1", "--num-processes", "2", "--process-id", "2"), "process 2 of 2"),
        (("--coordinator", "h:1", "--num-processes", "2", "--process-id", "1"), "2 processes of 1 devices have 2"),
        (("--env.tasks", "chandelier"), "chandelier"),
        (("--run.dir", f"{TOY}/run"), "configs/toy.toml/run: cannot be written: Not a directory"),
        (("--run.mirror", "nowhere://bucket"), "storage nowhere://bucket: 'nowhere' is unknown"),
        (("--rollout.slots", "100000000"), "rollout.slots = 100000000: their cache takes "),
        (("--rollout.group_size", "100000000"), "rollout.group_size = 100000000: their episodes take up to "),
    ],
)
def test_what_the_run_refuses(options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *options)


def test_weights_that_are_cut_short_or_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(toy_start(), tmp_path / "policy"))
    (weights,) = folder.glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    assert "truncated" in refused(capsys, "--model.path", str(folder))
    weights.write_bytes(whole)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    assert "tensor model.layers.3." in refused(capsys, "--model.path", str(folder))


@pytest.mark.medium
def test_full_scale_configurations_pass_on_virtual_devices(run_on_devices: Callable[[int, str], str]) -> None:
    shown = run_on_devices(64, FULL_SCALE).splitlines()
    assert len(shown) == 10 and all(line.endswith("16 tasks × 8") for line in shown)
