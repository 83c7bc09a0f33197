"""`empo2 serve`'s options: what they are without being given, what is refused, where the key may come from."""

import argparse
from pathlib import Path

import pytest

from empo2_jax.errors import ConfigError
from empo2_jax.rollout.serve_options import ServeOptions, add_options, parse_options


def parsed(*arguments: str) -> ServeOptions:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parse_options(parser.parse_args(["model", "--port", "0", *arguments]))


def test_what_is_not_given_is_as_the_help_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMPO2_API_KEY", raising=False)
    found = parsed()
    assert found == ServeOptions(Path("model"), 0)
    assert (found.host, found.slots, found.burst, found.max_waiting, found.max_body_mb) == (
        "127.0.0.1",
        16,
        16,
        512,
        32,
    )
    assert (found.dtype, found.max_length, found.api_key, found.grace_s) == (None, None, None, 30.0)
    parser = argparse.ArgumentParser()
    add_options(parser)
    said = " ".join(parser.format_help().split())
    assert "--slots N requests at a time (default: 16)" in said and "--grace S seconds to finish at the end" in said


def test_what_is_given_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPO2_API_KEY", "from outside")
    found = parsed("--max-length", "64", "--grace", "0.5", "--data", "2", "--dtype", "bfloat16", "--host", "0.0.0.0")
    assert (found.max_length, found.grace_s, found.data, found.dtype) == (64, 0.5, 2, "bfloat16")
    assert found.api_key == "from outside" and parsed("--api-key", "mine").api_key == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slots", "0"), "--slots 0: at least 1 is allowed"),
        (("--max-length", "1"), "--max-length 1: at least 2 is allowed"),
        (("--grace", "-1"), "--grace -1.0: at least 0 is allowed"),
        (("--data", "0"), "--data 0: at least 1 is allowed"),
        (("--port", "70000"), r"--port 70000: 0 \(any free one\) to 65535 are allowed"),
        (("--slots", "5", "--data", "2"), "--slots 5: a multiple of --data 2 is allowed"),
        (("--dtype", "float16"), "--dtype float16: float32 or bfloat16 is allowed"),
        (("--host", "0.0.0.0"), "--host 0.0.0.0 is reachable from other machines: --api-key"),
    ],
)
def test_what_cannot_be_served_is_refused(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EMPO2_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=message):
        parsed(*arguments)
