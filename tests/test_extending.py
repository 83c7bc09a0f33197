"""The example of docs/extending.md runs as it stands: played, checked, and trained on by the collector."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from empo2_jax.config import EnvConfig
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.envs.check import check
from empo2_jax.envs.registry import make_family
from empo2_jax.errors import ConfigError
from empo2_jax.play import play
from empo2_jax.rollout.collect import Assignment
from empo2_jax.rollout.replay import ReplayEngine
from tests.fixtures.worlds import make_collector, spoken, word_chat

DOCUMENT = Path(__file__).parents[1] / "docs" / "extending.md"


@pytest.fixture
def module_name(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) < 60
    (tmp_path / "worlds").mkdir()
    (tmp_path / "worlds" / "__init__.py").touch()
    (tmp_path / "worlds" / "guessing.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    importlib.invalidate_caches()
    yield "worlds.guessing"
    for name in ("worlds", "worlds.guessing"):
        sys.modules.pop(name, None)


def test_the_example_is_played_checked_and_collected(module_name):
    config = EnvConfig(name=module_name)
    family = make_family(config)
    assert isinstance(family, EnvironmentFamily)
    said, lines = iter(["guess 8", "what?", "?", "guess 3"]), []
    assert play(family, family.task("number", 3), 0, 30, lambda prompt: next(said), lines.append) == 100.0
    assert "It is smaller." in lines[1] and "guess 15" in lines[3] and lines[-1].startswith("solved after 3 actions")
    with pytest.raises(ConfigError, match="the tasks are number"):
        family.task("number", 16)
    report = check(config, processes=1)
    assert report.good and report.rows[0].score == 100.0
    collector = make_collector(
        ReplayEngine(spoken(word_chat(), lambda request: "look in the box")), family, step_limit=3
    )
    (episode,) = collector.collect([Assignment("one", family.tasks("test")[0])], temperature=1.0)
    collector.close()
    assert [step.resolution for step in episode.steps] == ["invalid"] * 3
    assert family.demonstrations("train", 2, 0)[0][-2].content.count("100 out of 100") == 1
