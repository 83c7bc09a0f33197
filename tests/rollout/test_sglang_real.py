"""A real SGLang server on the CPU (`bash launch/sglang_cpu.sh`): what its API takes and gives, and what we catch."""

import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from empo2_jax.errors import ConfigError, EngineError, SyncError
from empo2_jax.metrics import read_metrics
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.sharding import make_mesh
from empo2_jax.remote_engine import make_remote_engine
from empo2_jax.rollout import sglang
from empo2_jax.rollout.base import Completion
from empo2_jax.rollout.sglang import SglangEngine
from empo2_jax.sync.manifest import versions
from tests.fixtures.processes import empo2, train_arguments
from tests.fixtures.remote import (
    BAD,
    KEYS,
    MAX_LENGTH,
    VENV,
    Remote,
    Spoiled,
    ask,
    sample,
    sglang_servers,
    signal_sglang,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (VENV / "bin/python").is_file(), reason="no SGLang; bash launch/sglang_cpu.sh makes one"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    place = tmp_path_factory.mktemp("sglang")
    with sglang_servers(place, 1, KEYS) as urls:
        yield Remote(urls, place / "runs")


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def engine(served: Remote, request: pytest.FixtureRequest):
    engine = served.engine("".join(filter(str.isalnum, request.node.name)))
    engine.load(served.policy(1), 1)
    yield engine
    engine.close()


def test_sampled_logprobs_are_the_trainers(served: Remote, engine: SglangEngine) -> None:
    rng, params = np.random.default_rng(0), served.policy(1)
    prompts = [rng.integers(3, served.tokenizer.size, length) for length in (1, 7, 40, 40, 100)]
    requests = [ask(f"s{index}", ids, banned_from=served.tokenizer.size) for index, ids in enumerate(prompts)]
    for request, completion in zip(requests, sample(engine, *requests), strict=True):
        ids = np.concatenate([request.prompt_ids, completion.ids])
        expected = served.logprobs(params, ids)[-len(completion.ids) :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert completion.policy_version == 1 and completion.version_spans == ((1, 0, len(completion.ids)),)
        assert (completion.ids < served.tokenizer.size).all()
    assert engine.metrics()["engine/canary_abs_diff_max"] < 1e-4


def test_greedy_stop_and_prefix_cache(served: Remote, engine: SglangEngine) -> None:
    prompt = np.arange(3, 63)
    (free,) = sample(engine, ask("a", prompt, temperature=0.0))
    stop = int(free.ids[4])
    first = free.ids.tolist().index(stop)
    (stopped,) = sample(engine, ask("a", prompt, temperature=0.0, stop_ids=(stop,)))
    assert stopped.stopped and stopped.ids.tolist() == free.ids[: first + 1].tolist()
    assert stopped.cached_tokens >= 50
    longer = np.concatenate([prompt, free.ids, [3, 4, 5]])
    assert sample(engine, ask("a", longer))[0].cached_tokens >= len(prompt)


def test_many_requests_at_once(served: Remote, engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "SCRAPE_S", 0.02)
    rng = np.random.default_rng(1)
    requests = [
        ask(f"s{index}", rng.integers(3, served.tokenizer.size, 5 + 3 * index), banned_from=served.tokenizer.size)
        for index in range(32)
    ]
    completions = sample(engine, *requests)
    index = 17
    ids = np.concatenate([requests[index].prompt_ids, completions[index].ids])
    expected = served.logprobs(served.policy(1), ids)[-len(completions[index].ids) :]
    np.testing.assert_allclose(completions[index].logprobs, expected, atol=1e-4)
    metrics = engine.metrics()
    assert metrics["engine/servers_ready"] == 1 and "engine/tokens_per_s" in metrics


def test_new_weights_serve_and_the_cache_of_the_old_is_gone(served: Remote, engine: SglangEngine) -> None:
    prompt = np.arange(3, 83)
    sample(engine, ask("a", prompt))
    engine.release("a")
    engine.load(served.policy(2), 2)
    (completion,) = sample(engine, ask("a", prompt))
    expected = served.logprobs(served.policy(2), np.concatenate([prompt, completion.ids]).astype(np.int32))
    np.testing.assert_allclose(completion.logprobs, expected[-len(completion.ids) :], atol=1e-4)
    assert completion.policy_version == 2 and completion.cached_tokens == 0


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_folder_is_refused_and_the_old_weights_serve(name: str, served: Remote, engine: SglangEngine) -> None:
    engine._publish = Spoiled(engine._publish, BAD[name])
    with pytest.raises(SyncError, match=r"version 2|/2"):
        engine.load(served.policy(2), 2)
    prompt = np.arange(3, 23)
    (completion,) = sample(engine, ask("b", prompt))
    expected = served.logprobs(served.policy(1), np.concatenate([prompt, completion.ids]).astype(np.int32))
    np.testing.assert_allclose(completion.logprobs, expected[-len(completion.ids) :], atol=1e-4)
    assert completion.policy_version == engine.policy_version == 1


@pytest.mark.parametrize("name", ["wrong names", "one layer", "transposed"])
def test_the_canary_alone_catches_what_the_server_takes_in_silence(
    name: str, served: Remote, engine: SglangEngine
) -> None:
    engine._pool._validate = lambda folder: None
    engine._publish = Spoiled(engine._publish, BAD[name])
    with pytest.raises(EngineError, match="the canary differs by"):
        engine.load(served.policy(2), 2)
    assert sample(engine, ask("c", [3, 4]))[0].policy_version == 1


def test_a_wrong_key_is_one_clear_error(served: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, told in (("EMPO2_ADMIN_KEY", "pause_generation"), ("EMPO2_API_KEY", "info")):
        monkeypatch.setenv(name, "nonsense")
        engine = served.engine(f"key {name}")
        with pytest.raises(EngineError, match=rf"{told}.*the key in \${name} was refused \(401\)"):
            engine.load(served.policy(1), 1)
        engine.close()
        monkeypatch.setenv(name, KEYS[name])


def test_too_little_room_is_said_before_anything_is_sampled(served: Remote) -> None:
    engine = served.engine("room")
    engine._pool._max_length = 20_000_000
    with pytest.raises(ConfigError, match="takes prompts of at most"):
        engine.load(served.policy(1), 1)
    engine.close()


def test_a_server_of_another_model_is_named_before_it_dies_of_a_load(served: Remote) -> None:
    larger = replace(served.config, hidden_size=2 * served.config.hidden_size)
    model, mesh = Qwen2(larger, rngs=nnx.Rngs(0)), make_mesh(jax.devices(), 1, 1, 1)
    engine = make_remote_engine(served.experiment("other"), model, served.tokenizer, served.folder, mesh, MAX_LENGTH)
    with pytest.raises(ConfigError, match="serves another model: hidden_size 96, the trainer has 192"):
        engine.load(nnx.split(model)[1], 1)
    engine.close()


def test_an_over_long_request_fails_alone(served: Remote, engine: SglangEngine) -> None:
    engine.max_length = 10**6  # so that it is sent
    good, bad = engine.generate([ask("a", [3, 4]), ask("b", [3] * 100, max_tokens=10**5)])
    assert isinstance(good, Completion) and isinstance(bad, EngineError)
    assert "maximum context length" in str(bad) or "longer" in str(bad)


def test_memory_can_be_given_back_and_taken(served: Remote, engine: SglangEngine) -> None:
    engine.release_memory()
    with pytest.raises(EngineError, match="gave their memory back"):
        raise engine.generate([ask("a", [3, 4])])[0]
    engine.load(served.policy(2), 2)
    assert sample(engine, ask("a", [3, 4]))[0].policy_version == 2
    engine.release_memory()
    engine.close()  # and a trainer that was started again
    again = served.engine("woken")
    again.load(served.policy(1), 1)
    assert sample(again, ask("a", [3, 4]))[0].policy_version == 1
    assert again.metrics()["engine/servers_ready"] == 1
    again.close()


def test_a_run_on_the_toy_world_samples_there_and_learns_here(served: Remote) -> None:
    place = served.runs.parent / "toy"
    arguments = train_arguments(place, "--rollout.engine", "sglang", "--rollout.servers", served.urls[0])
    result = empo2(*arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = read_metrics(place)
    assert len(lines) == 2
    for line in lines:
        assert 0 < line["mismatch/logprob_abs_diff_max"] < 1e-4
        assert line["engine/servers_ready"] == 1 and line["engine/canary_abs_diff_max"] < 1e-4
        assert line["engine/given_up"] == line["engine/stale"] == line["engine/taken_out"] == 0
        assert line["engine/cached_share"] > 0.3
    assert versions(place / "weights") == [0, 1, 2]
    assert "differ by" not in result.stderr  # the gap's alarm


def test_a_server_that_hangs_keeps_its_weights(served: Remote) -> None:
    engine = served.engine("hang", request_timeout_s=20.0)
    engine.load(served.policy(1), 1)
    signal_sglang(served.urls[0], signal.SIGSTOP)
    threading.Timer(25.0, signal_sglang, (served.urls[0], signal.SIGCONT)).start()
    assert sample(engine, ask("hang", np.arange(3, 23)))[0].policy_version == 1
    metrics = engine.metrics()
    assert metrics["engine/taken_out"] >= 1 and metrics["engine/retries"] >= 1 and metrics["engine/servers_ready"] == 1
    assert metrics["engine/reloads"] == metrics["engine/given_up"] == 0
    engine.close()


def test_a_killed_server_comes_back_with_the_current_weights(served: Remote, engine: SglangEngine) -> None:
    """Last: it takes as long as a start."""
    engine.load(served.policy(3), 3)
    signal_sglang(served.urls[0], signal.SIGKILL)
    request = replace(ask("a", np.arange(3, 30)), session="killed")
    (completion,) = sample(engine, request)
    ids = np.concatenate([request.prompt_ids, completion.ids])
    expected = served.logprobs(served.policy(3), ids)[-len(completion.ids) :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    metrics = engine.metrics()
    assert metrics["engine/taken_out"] == 1 and metrics["engine/reloads"] == 1 and metrics["engine/servers_ready"] == 1
    shutil.rmtree(served.runs, ignore_errors=True)
