"""Which servers can serve the policy at all; the others get no weights, whenever they come."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from empo2_jax.errors import ConfigError, EngineError
from empo2_jax.models.qwen2_config import Qwen2Config
from tests.fixtures.sglang_fake import (
    VOCAB,
    FakeServer,
    fake_engine,
    only,
    ready,
    until,
)


@pytest.fixture
def other_model(tmp_path: Path) -> str:
    """Folder of a model of other shapes."""
    folder = tmp_path / "other model"
    folder.mkdir()
    shapes = Qwen2Config(VOCAB, 32, 2, 2, 1, 8, 32)
    (folder / "config.json").write_text(json.dumps(shapes.to_hf()), encoding="utf-8")
    return str(folder)


def test_a_server_without_room_for_an_episode_is_refused(tmp_path: Path) -> None:
    server = FakeServer()
    engine = fake_engine([server], tmp_path)
    server.context = 30
    with pytest.raises(ConfigError, match="prompts of at most 24 tokens, episodes with their tip have up to 48"):
        engine.load(7, 1)
    engine.close()
    server.close()


def test_a_server_of_another_model_that_comes_later_is_not_loaded(tmp_path: Path, other_model: str) -> None:
    up, late = FakeServer(), FakeServer()
    port = late.http.server_address[1]
    late.close()
    engine = fake_engine([up, late], tmp_path)
    engine.load(7, 1)
    late = FakeServer(port, folder=other_model)
    until(lambda: late.count("/server_info") >= 2)
    engine.load(8, 2)
    until(lambda: late.count("/server_info") >= 4)
    assert ready(engine) == 1 and late.count("/update_weights_from_disk") == late.count("/pause_generation") == 0
    late.folder = up.folder  # it was started again with the policy's folder
    until(lambda: ready(engine) == 2)
    assert late.seed == 8
    engine.close()
    up.close()
    late.close()


def test_a_server_that_became_another_model_behind_our_back_is_not_loaded(
    engine, servers, other_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    servers[1].folder = other_model
    engine.load(8, 2)
    assert ready(engine) == 1 and only(engine).policy_version == 2
    assert [server.count("/update_weights_from_disk") for server in servers] == [2, 1]
    assert "serves another model: hidden_size 32, the trainer has 16" in caplog.text
    servers[0].folder = other_model
    engine._pool._settings = replace(engine._pool._settings, recovery_s=0.3)
    with pytest.raises(EngineError, match=r"no rollout server is ready within 0.3 s: .* serves another model"):
        engine.load(9, 3)
