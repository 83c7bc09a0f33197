"""The presets are held to the paper's numbers, the documentation to the table, the draws to the shares."""

import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from empo2_jax.algorithms import empo2
from empo2_jax.cli import build_parser, main
from empo2_jax.config import Config
from empo2_jax.config_file import load_config
from empo2_jax.ops.advantages import group_advantages
from empo2_jax.ops.ratios import LOG_RATIO_LIMIT
from empo2_jax.paper import SETTINGS, Setting, default, table
from empo2_jax.types import Mode

ROOT = Path(__file__).parents[1]
FILES = {
    "paper": "configs/presets/paper.toml",
    "code": "configs/presets/released-code.toml",
    "webshop": "configs/webshop_qwen2.5_7b.toml",
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


def test_the_full_scienceworld_configuration_uses_the_papers_model() -> None:
    assert load_config(ROOT / "configs/scienceworld_qwen2.5_7b.toml").model.path == "Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.what)
def test_a_setting_is_used_where_the_table_says(setting: Setting) -> None:
    source = (ROOT / "empo2_jax" / setting.used).read_text(encoding="utf-8")
    assert re.search(rf"\b{setting.key.rpartition('.')[2]}\b", source)


def test_each_key_stands_once_and_is_known() -> None:
    keys = [setting.key for setting in SETTINGS if setting.key]
    assert len(keys) == len(set(keys)) and len(keys) > 45
    assert all(default(setting) is not None for setting in SETTINGS if setting.key)


def test_fixed_numbers_are_those_of_the_code() -> None:
    fixed = {setting.used: setting.paper for setting in SETTINGS if not setting.key}
    eps = inspect.signature(group_advantages).parameters["eps"].default
    trials = build_parser().parse_args(["adapt", "run"]).trials
    assert fixed == {"ops/ratios.py": LOG_RATIO_LIMIT, "ops/advantages.py": eps, "cli.py": trials}


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
