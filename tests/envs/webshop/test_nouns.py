"""Nouns by rule on titles whose nouns are plain, and the setting."""

import importlib.util
import logging

import pytest

from empo2_jax.envs.webshop import nouns
from empo2_jax.errors import ConfigError


@pytest.mark.parametrize(
    ("title", "found"),
    [
        ("Alderwick Women's Running Shoes, Size 9.5", ["alderwick", "women", "running", "shoes", "size"]),
        ("the 12 of and", []),
        ("Waterproof and washable 5 oz comfortable bottle", ["bottle"]),
        ("Table table TABLE", ["table", "table", "table"]),
        ("Café crème", ["café", "crème"]),
        ("", []),
        ("!!! 123 \x00", []),
    ],
)
def test_rules(title: str, found: list[str]) -> None:
    assert nouns.rules(title) == found


def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert nouns.extractor("rules")("coffee table") == ["coffee", "table"]
    assert "by rule, not by spaCy" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("spacy") is not None, reason="spaCy is installed")
def test_spacy_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="needs spaCy with its model en_core_web_lg"):
        nouns.extractor("spacy")
