"""Two fake SGLang servers, and the engine over them with version 1."""

from pathlib import Path

import pytest

from tests.fixtures.sglang_fake import FakeServer, fake_engine


@pytest.fixture
def servers():
    started = [FakeServer(), FakeServer()]
    yield started
    for server in started:
        server.close()


@pytest.fixture
def engine(servers, tmp_path: Path):
    engine = fake_engine(servers, tmp_path)
    engine.load(7, 1)
    yield engine
    engine.close()
