"""docs/troubleshooting.md: every key exists, every alarm of the package leads to a section."""

import re
from pathlib import Path

from empo2_jax.config import Config
from empo2_jax.errors import GUIDE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", PAGE, re.MULTILINE)}
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "empo2_jax").rglob("*.py"))}
ALARMS = {path: text for path, text in SOURCES.items() if ".warning(" in text}


def test_every_key_exists() -> None:
    known = {f"{name}.{key}" for name, section in Config() for key, _ in section}
    named = set(re.findall(r"`([a-z]+\.[a-z_0-9]+)(?: = [^`]+)?`", PAGE)) - {"metrics.jsonl"}
    assert len(named) > 45
    assert named <= known


def test_every_alarm_leads_to_a_section() -> None:
    assert {path.name for path in ALARMS} >= {"alarms.py", "storage.py", "sglang_pool.py", "checkpoint.py", "store.py"}
    assert {path.name for path in ALARMS} >= {"__init__.py", "nouns.py"}  # WebShop's
    assert GUIDE == "see docs/troubleshooting.md#"
    for path, text in ALARMS.items():
        refusals = len(re.findall(r"raise \w+Error\(", text)) if path.name == "alarms.py" else 0
        assert len(links(text)) == text.count(".warning(") + refusals, path


def test_every_link_leads_to_a_section() -> None:
    linked = {link for text in SOURCES.values() for link in links(text)}
    assert linked <= SECTIONS
    symptoms = {"entropy-out-of-bounds", "engine-and-trainer-disagree", "groups-that-all-fail", "memory-that-hurts"}
    assert linked >= symptoms | {"out-of-memory"}


def links(text: str) -> list[str]:
    """Sections of the guide that are named at the end of a message."""
    return re.findall(r"(?:%s|\{GUIDE\})([a-z]+(?:-[a-z]+)+)[\"']", text)
