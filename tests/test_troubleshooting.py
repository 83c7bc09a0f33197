"""docs/troubleshooting.md: every key exists, every alarm leads to a section."""

import re
from pathlib import Path

from empo2_jax.config import Config

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ALARMS = (ROOT / "empo2_jax/alarms.py").read_text(encoding="utf-8")


def test_every_key_exists() -> None:
    known = {f"{name}.{key}" for name, section in Config() for key, _ in section}
    named = set(re.findall(r"`([a-z]+\.[a-z_0-9]+)(?: = [^`]+)?`", PAGE)) - {"metrics.jsonl"}
    assert len(named) > 40
    assert named <= known


def test_every_alarm_leads_to_a_section() -> None:
    sections = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", PAGE, re.MULTILINE)}
    linked = re.findall(r"(?:%s|\{_GUIDE\})([a-z-]+)[\"']", ALARMS)
    assert set(linked) <= sections
    assert len(linked) == ALARMS.count("_log.warning(") + len(re.findall(r"raise \w+Error\(", ALARMS))
