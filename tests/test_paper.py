"""The presets are held to the paper's numbers, the documentation to the table, the draws to the shares."""

import ast
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from empo2_jax.algorithms import empo2
from empo2_jax.cli import build_parser, main
from empo2_jax.config import Config
from empo2_jax.config_file import load_config
from empo2_jax.envs.webshop import goals
from empo2_jax.ops.advantages import group_advantages
from empo2_jax.ops.losses import k3_divergence
from empo2_jax.ops.ratios import LOG_RATIO_LIMIT
from empo2_jax.paper import NOT_IN_WEBSHOP, SETTINGS, Setting, default, table, webshop_own
from empo2_jax.types import Mode

ROOT = Path(__file__).parents[1]
FILES = {
    "paper": "configs/presets/paper.toml",
    "code": "configs/presets/released-code.toml",
    "webshop": "configs/webshop_qwen2.5_7b.toml",
}
TREES = {
    path.relative_to(ROOT / "empo2_jax").as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in (ROOT / "empo2_jax").rglob("*.py")
}
BASELINES = ("reflexion", "retrospex")  # sections with files of their own
# Values that our configurations do not take over; the table's note says why.
OTHERWISE = {("paper", "model.path"), ("code", "model.path"), ("webshop", "rollout.max_length")}


def value_of(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def config_of(source: str, key: str, config: Config) -> Config:
    """Where the value stands: `config`, or the file of the baseline whose section it is."""
    section = key.partition(".")[0]
    world = {"paper": "scienceworld", "webshop": "webshop"}.get(source)
    return load_config(ROOT / f"configs/baselines/{world}_{section}.toml") if section in BASELINES else config


@pytest.mark.parametrize("source", FILES)
def test_presets_have_the_numbers_of_their_source(source: str) -> None:
    config = load_config(ROOT / FILES[source])
    given = {s.key: getattr(s, source) for s in SETTINGS if s.key and getattr(s, source) is not None}
    own = {key: config_of(source, key, config) for key in given}
    differ = {key for key, value in given.items() if value_of(own[key], key) != value}
    assert differ == {key for where, key in OTHERWISE if where == source}
    assert all(next(s.note for s in SETTINGS if s.key == key) for key in differ)


@pytest.mark.parametrize("source", ["paper", "code"])
def test_where_a_source_does_not_say_its_preset_has_our_default(source: str) -> None:
    config = load_config(ROOT / FILES[source])
    unsaid = [s for s in SETTINGS if s.key and getattr(s, source) is None]
    assert unsaid
    assert {s.key: value_of(config, s.key) for s in unsaid} == {s.key: default(s) for s in unsaid}


def test_our_own_choices_for_webshop_are_listed() -> None:
    config, own = load_config(ROOT / FILES["webshop"]), webshop_own()
    assert own == {key: value_of(config, key) for key in own}
    assert own.keys() | set(NOT_IN_WEBSHOP) == {s.key for s in SETTINGS if s.key and s.webshop is None}
    choices = {"algorithm.mode_scope": "episode", "algorithm.advantage_std_floor": 5.0}
    choices |= {"memory.tip_max_tokens": 128, "memory.placement": "latest"}
    assert own.items() >= choices.items()
    assert all(f"\n- `{key}` = " in table() for key in own)


def test_the_full_scienceworld_configuration_uses_the_papers_model() -> None:
    assert load_config(ROOT / "configs/scienceworld_qwen2.5_7b.toml").model.path == "Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.key], ids=lambda setting: setting.key)
def test_a_setting_is_used_where_the_table_says(setting: Setting) -> None:
    section, _, name = setting.key.partition(".")
    used = TREES[setting.used]
    # Read from the section there, or a parameter there that another module hands over from the section.
    handed = takes(used, name) and any(reads(tree, section, name) for tree in TREES.values())
    assert reads(used, section, name) or handed


def reads(tree: ast.Module, section: str, name: str) -> bool:
    """Whether code, not a comment or a text, reads `section.name`, also as `config.name` or `settings.name`."""
    owners = {
        ast.unparse(node.value).rpartition(".")[2].lstrip("_")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == name
    }
    return bool(owners & {section, "config", "settings"})


def takes(tree: ast.Module, name: str) -> bool:
    """Whether a function has a parameter of this name, or a class a field."""
    return any(
        (isinstance(node, ast.arg) and node.arg == name)
        or (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name)
        for node in ast.walk(tree)
    )


def test_a_mere_word_is_no_use() -> None:
    tree = ast.parse("# top_k\nx = 'memory.top_k'\ny = other.top_k\ndef f(capacity): return memory.scope")
    assert not reads(tree, "memory", "top_k") and not takes(tree, "top_k")
    assert takes(tree, "capacity") and not reads(tree, "memory", "capacity")
    assert reads(tree, "memory", "scope") and not reads(tree, "novelty", "scope")


def test_each_key_stands_once_and_is_known() -> None:
    keys = [setting.key for setting in SETTINGS if setting.key]
    assert len(keys) == len(set(keys)) and len(keys) > 45
    assert all(default(setting) is not None for setting in SETTINGS if setting.key)
    assert {setting.used for setting in SETTINGS} <= TREES.keys()


def test_fixed_numbers_are_those_of_the_code() -> None:
    fixed = {setting.what: setting for setting in SETTINGS if not setting.key}
    eps = inspect.signature(group_advantages).parameters["eps"].default
    trials = build_parser().parse_args(["adapt", "run"]).trials
    estimates = k3_divergence(jnp.zeros(2), jnp.asarray([-0.5, 100.0]))  # d = −0.5, and far beyond every limit
    assert estimates[0] == pytest.approx(0.1065307)  # e^−0.5 + 0.5 − 1
    assert {what: setting.fixed for what, setting in fixed.items()} == {
        "limit of the log ratio, nats": LOG_RATIO_LIMIT,
        "KL estimator": "k3",
        "limit of the estimate, nats": float(estimates[1]),
        "added to the deviation (ddof 1)": eps,
        "pairs of observation and action in a prompt": "all",
        "first WebShop goal that is trained on": goals.TEST,
        "trials of adaptation on other tasks": trials,
    }
    differ = {what for what, s in fixed.items() if {s.paper, s.code, s.webshop} - {None, s.fixed}}
    assert differ == {"pairs of observation and action in a prompt"}


@pytest.mark.parametrize("preset", ["paper", "released-code", "empo2"])
def test_realized_shares_of_the_modes_are_the_papers(preset: str) -> None:
    config = load_config(ROOT / f"configs/presets/{preset}.toml").algorithm
    groups, members = (1, 1) if config.mode_scope == "iteration" else (16, 8)
    iterations = 12_800 // (groups * members)
    modes = Counter(
        empo2.draw_mode(config, 0, i, g, m) for i in range(iterations) for g in range(groups) for m in range(members)
    )
    # 75 %, 8.3 %, 16.7 %, within four standard errors
    for mode, share in ((Mode.ON_POLICY, 3 / 4), (Mode.ON_POLICY_WITH_MEMORY, 1 / 12), (Mode.OFF_POLICY, 1 / 6)):
        assert abs(modes[mode] / 12_800 - share) < 4 * (share * (1 - share) / 12_800) ** 0.5
    if config.mode_scope == "iteration":  # one mode for all episodes of an iteration
        assert all(
            len({empo2.draw_mode(config, 0, i, g, m) for g in range(16) for m in range(8)}) == 1 for i in range(20)
        )


def test_the_documentation_is_made_from_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper"]) == 0
    text = capsys.readouterr().out
    assert text == table() + "\n" == (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    assert "| ε_high | 0.3 | 0.3 | 0.2 | `algorithm.clip_high` | 0.3 | `ops/losses.py` |" in text
