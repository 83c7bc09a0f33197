"""Faults of rollout servers, each with real processes: what a user sees, and what goes on.

A server that cannot be told from a sound one until it answers is a fake in a process of its own; the others are
`empo2 serve`. The same faults of a real SGLang are in tests/rollout/test_sglang_real.py, many runs in
tests/e2e/test_server_runs.py.
"""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from empo2_jax import assets
from empo2_jax.errors import ConfigError, Empo2Error, EngineError
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.sharding import make_mesh
from empo2_jax.remote_engine import make_remote_engine
from empo2_jax.rollout.base import Completion
from empo2_jax.rollout.sglang import SglangEngine
from tests.fixtures.processes import ROOT, empo2, start, train_arguments
from tests.fixtures.remote import BAD, MAX_LENGTH, Remote, Spoiled, ask, sample
from tests.fixtures.servers import Server, running_server
from tests.fixtures.sglang_fake import FakeProcess, fake_engine, fake_request

pytestmark = pytest.mark.medium
OPTIONS = ("--slots", "4", "--max-length", str(MAX_LENGTH), "--burst", "4")


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def ready(engine: SglangEngine) -> float:
    return engine.metrics()["engine/servers_ready"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(assets.toy_start(), *OPTIONS, key="right") as running:
        yield running


@pytest.fixture(scope="module")
def served(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Remote:
    return Remote([server.url], tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True, scope="module")
def key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMPO2_API_KEY", "right")
        yield


@pytest.fixture(scope="module")
def trainer(served: Remote) -> Iterator[SglangEngine]:
    engine = served.engine("run")
    yield engine
    engine.close()


@pytest.fixture
def engine(trainer: SglangEngine, served: Remote) -> SglangEngine:
    """One trainer's engine, serving the policy of seed 1 as version 1."""
    trainer.load(served.policy(1), 1)
    return trainer


def check_serves(served: Remote, engine: SglangEngine, seed: int) -> None:
    """What is sampled has the trainer's log-probs under the policy of `seed`, which is also its version."""
    request = ask(f"check {time.monotonic()}", np.arange(3, 23))
    (completion,) = sample(engine, request)
    ids = np.concatenate([request.prompt_ids, completion.ids])
    expected = served.logprobs(served.policy(seed), ids)[-len(completion.ids) :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
    assert completion.policy_version == engine.policy_version == seed


def refused(served: Remote, engine: SglangEngine, patch: pytest.MonkeyPatch, damage: str) -> str:
    """Publish a version that is then damaged; what is said about it."""
    with patch.context() as during:
        during.setattr(engine, "_publish", Spoiled(engine._publish, BAD[damage]))
        with pytest.raises(Empo2Error) as caught:
            engine.load(served.policy(2), 2)
    check_serves(served, engine, 1)
    return str(caught.value)


@pytest.mark.parametrize("damage", list(BAD))
def test_a_bad_folder_reaches_no_server(
    damage: str, served: Remote, engine: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert re.search(r"version 2|/2", refused(served, engine, monkeypatch, damage))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("transposed", "the canary differs by"),
        ("wrong names", "cannot be read"),
        ("wrong shape", "has shape"),
        ("truncated", "truncated"),
        ("missing shard", "file not found"),
    ],
)
def test_what_was_damaged_after_the_check_is_refused_by_the_server_or_by_the_canary(
    damage: str, said: str, served: Remote, engine: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._pool, "_validate", lambda folder: None)
    assert re.match(f"no server took version 2 over: .*{said}", refused(served, engine, monkeypatch, damage))


def test_memory_is_given_back_and_a_restarted_trainer_wakes_the_server(served: Remote, engine: SglangEngine) -> None:
    engine.release_memory()
    with pytest.raises(EngineError, match="gave their memory back"):
        raise engine.generate([ask("a", [3, 4])])[0]
    again = served.engine("again")
    again.load(served.policy(1), 1)
    check_serves(served, again, 1)
    again.close()


def test_a_wrong_key_is_one_clear_error(served: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPO2_API_KEY", "wrong")
    engine = served.engine("key")
    with pytest.raises(EngineError, match=r"the key in \$EMPO2_API_KEY was refused \(401\)") as caught:
        engine.load(served.policy(1), 1)
    assert "wrong" not in str(caught.value)
    engine.close()


def test_a_server_of_another_model_is_named_before_anything_is_loaded(served: Remote) -> None:
    larger = replace(served.config, hidden_size=2 * served.config.hidden_size)
    model, mesh = Qwen2(larger, rngs=nnx.Rngs(0)), make_mesh(jax.devices(), 1, 1, 1)
    engine = make_remote_engine(served.experiment("other"), model, served.tokenizer, served.folder, mesh, MAX_LENGTH)
    with pytest.raises(ConfigError, match="serves another model: hidden_size 96, the trainer has 192"):
        engine.load(nnx.split(model)[1], 1)
    engine.close()


def test_an_over_long_request_fails_alone(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "max_length", 10**6)  # so that it is sent
    good, bad = engine.generate([ask("a", [3, 4]), ask("b", [3] * 100, max_tokens=10**5)])
    assert isinstance(good, Completion) and isinstance(bad, EngineError)
    assert "exceed the context of 256 tokens (400)" in str(bad)


@pytest.mark.slow
def test_a_server_that_is_down_at_the_start_then_hangs_then_dies(served: Remote) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    served = replace(served, urls=[*served.urls, f"http://127.0.0.1:{port}"])
    engine = served.engine("two", request_timeout_s=20.0)
    engine.load(served.policy(1), 1)
    assert ready(engine) == 1
    check_serves(served, engine, 1)

    # It comes up with the weights of its folder, and gets the run's before it serves.
    late = start("serve", str(assets.toy_start()), "--port", str(port), *OPTIONS, "--api-key", "right")
    try:
        until(lambda: ready(engine) == 2)

        requests = [ask(f"s{index}", np.arange(3, 23 + index)) for index in range(4)]
        sample(engine, *requests)  # two sessions for each
        engine.metrics()
        os.kill(late.pid, signal.SIGSTOP)
        sample(engine, *requests)
        metrics = engine.metrics()
        assert metrics["engine/servers_ready"] == 1 and metrics["engine/given_up"] == 0
        assert metrics["engine/retries"] == metrics["engine/rerouted"] == 2 and metrics["engine/taken_out"] == 1
        os.kill(late.pid, signal.SIGCONT)
        until(lambda: ready(engine) == 2)
        assert engine.metrics()["engine/reloads"] == 0  # it still had the weights

        os.kill(late.pid, signal.SIGKILL)
        late.wait()
        for request in requests:
            engine.release(request.session)
        sample(engine, *requests)
        assert ready(engine) == 1
        engine.load(served.policy(2), 2)
        check_serves(served, engine, 2)
    finally:
        late.kill()
        late.communicate()
        engine.close()


def test_a_run_without_any_server_ends_with_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    options = ("--rollout.engine", "sglang", "--rollout.servers", url, "--rollout.recovery_timeout_s", "0.5")
    result = empo2(*train_arguments(tmp_path / "run", *options))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"error: no rollout server is ready within 0.5 s: {url} does not answer\n" in result.stderr


@pytest.fixture
def fakes(request: pytest.FixtureRequest) -> Iterator[list[FakeProcess]]:
    """Processes of a server with a fault and of a sound one."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-m", "tests.fixtures.sglang_fake")
    processes = [
        subprocess.Popen((*command, name), stdout=subprocess.PIPE, text=True, env=environment)
        for name in (request.param, "sound")
    ]
    yield [FakeProcess(process.stdout.readline().strip()) for process in processes if process.stdout]
    for process in processes:
        process.kill()
        process.communicate()


# A liar is found out by the canary before it gets a request; the others get half of the requests at first, and more
# each time they pass the canary again before the requests are done.
@pytest.mark.parametrize(
    ("fakes", "least", "most"), [("garbage", 2, math.inf), ("fewer", 2, math.inf), ("liar", 0, 0)], indirect=["fakes"]
)
def test_a_server_that_answers_nonsense_or_lies_costs_retries(
    fakes: list[FakeProcess], least: float, most: float, tmp_path: Path
) -> None:
    engine = fake_engine(fakes, tmp_path)
    engine.load(7, 1)
    engine.load(8, 2)
    completions = engine.generate([fake_request(f"s{index}") for index in range(4)])
    assert all(isinstance(item, Completion) and item.policy_version == 2 for item in completions)
    metrics = engine.metrics()
    assert metrics["engine/given_up"] == 0
    assert least <= metrics["engine/retries"] <= most
    engine.close()
