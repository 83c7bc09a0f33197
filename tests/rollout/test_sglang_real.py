"""A real SGLang server on the CPU (`bash launch/sglang_cpu.sh`): what its API takes and gives, and what we catch."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from empo2_jax import assets
from empo2_jax.config import Config, parse_config
from empo2_jax.errors import ConfigError, EngineError, SyncError
from empo2_jax.metrics import read_metrics
from empo2_jax.models.hf_weights import read_config
from empo2_jax.models.qwen2 import Qwen2, Qwen2Config
from empo2_jax.models.sharding import make_mesh
from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.randomness import words
from empo2_jax.remote_engine import canary_scorer, make_remote_engine
from empo2_jax.rollout import sglang
from empo2_jax.rollout.base import Completion, Request, Sampling
from empo2_jax.rollout.sglang import SglangEngine
from empo2_jax.sync.manifest import versions
from tests.fixtures.processes import ROOT, empo2, train_arguments

VENV = Path(os.environ.get("EMPO2_SGLANG_VENV", ROOT / ".sglang"))
KEYS = {"EMPO2_API_KEY": "first key", "EMPO2_ADMIN_KEY": "second key"}
START_S = 600.0  # two shared cores
MAX_LENGTH = 256

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (VENV / "bin/python").is_file(), reason="no SGLang; bash launch/sglang_cpu.sh makes one"),
]


@dataclass
class Served:
    """A running server with the policy that it is to serve."""

    url: str
    folder: Path  # of the start weights
    tokenizer: Tokenizer
    config: Qwen2Config
    runs: Path

    def policy(self, seed: int) -> Any:
        return nnx.split(Qwen2(self.config, rngs=nnx.Rngs(seed)))[1]

    def experiment(self, name: str, **rollout: Any) -> Config:
        settings = {"engine": "sglang", "servers": [self.url], "recovery_timeout_s": START_S, **rollout}
        return parse_config({"run": {"dir": str(self.runs / name)}, "rollout": settings})

    def engine(self, name: str, **rollout: Any) -> SglangEngine:
        model, mesh = Qwen2(self.config, rngs=nnx.Rngs(0)), make_mesh(jax.devices(), 1, 1, 1)
        experiment = self.experiment(name, **rollout)
        return make_remote_engine(experiment, model, self.tokenizer, self.folder, mesh, MAX_LENGTH)

    def logprobs(self, params: Any, ids: np.ndarray) -> np.ndarray:
        """The trainer's, of all ids but the first; one padded shape, so that it compiles once."""
        model, mesh = Qwen2(self.config, rngs=nnx.Rngs(0)), make_mesh(jax.devices(), 1, 1, 1)
        padded = np.zeros(MAX_LENGTH, np.int32)
        padded[: len(ids)] = ids
        return canary_scorer(Config(), model, mesh, padded)(params)[: len(ids) - 1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    place, folder = tmp_path_factory.mktemp("sglang"), assets.toy_start()
    tokenizer, config = Tokenizer.load(folder), read_config(folder)
    urls = place / "urls.txt"
    command = ["bash", str(ROOT / "launch/sglang_servers.sh"), str(folder), "--cpu", "--venv", str(VENV)]
    command += ["--urls", str(urls), "--logs", str(place / "logs"), "--wait", str(int(START_S))]
    launcher = subprocess.Popen(command, env=os.environ | KEYS)
    try:
        while not urls.is_file():
            assert launcher.poll() is None, "the launcher ended"
            time.sleep(0.5)
        yield Served(urls.read_text(encoding="utf-8").strip(), folder, tokenizer, config, place / "runs")
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
    assert not urls.is_file()


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def engine(served: Served, request: pytest.FixtureRequest):
    engine = served.engine("".join(filter(str.isalnum, request.node.name)))
    engine.load(served.policy(1), 1)
    yield engine
    engine.close()


def ask(session: str, ids: Any, **sampling: Any) -> Request:
    settings = Sampling(**{"max_tokens": 12, "temperature": 1.0, "stop_ids": (), **sampling})
    return Request(session, np.asarray(ids, np.int32), words(0, "real", session), settings)


def sample(engine: SglangEngine, *requests: Request) -> list[Completion]:
    completions = engine.generate(requests)
    assert all(isinstance(item, Completion) for item in completions), completions
    return [item for item in completions if isinstance(item, Completion)]


def test_sampled_logprobs_are_the_trainers(served: Served, engine: SglangEngine) -> None:
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


def test_greedy_stop_and_prefix_cache(served: Served, engine: SglangEngine) -> None:
    prompt = np.arange(3, 63)
    (free,) = sample(engine, ask("a", prompt, temperature=0.0))
    stop = int(free.ids[4])
    first = free.ids.tolist().index(stop)
    (stopped,) = sample(engine, ask("a", prompt, temperature=0.0, stop_ids=(stop,)))
    assert stopped.stopped and stopped.ids.tolist() == free.ids[: first + 1].tolist()
    assert stopped.cached_tokens >= 50
    longer = np.concatenate([prompt, free.ids, [3, 4, 5]])
    assert sample(engine, ask("a", longer))[0].cached_tokens >= len(prompt)


def test_many_requests_at_once(served: Served, engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_new_weights_serve_and_the_cache_of_the_old_is_gone(served: Served, engine: SglangEngine) -> None:
    prompt = np.arange(3, 83)
    sample(engine, ask("a", prompt))
    engine.release("a")
    engine.load(served.policy(2), 2)
    (completion,) = sample(engine, ask("a", prompt))
    expected = served.logprobs(served.policy(2), np.concatenate([prompt, completion.ids]).astype(np.int32))
    np.testing.assert_allclose(completion.logprobs, expected[-len(completion.ids) :], atol=1e-4)
    assert completion.policy_version == 2 and completion.cached_tokens == 0


def _edit(folder: Path, change: Any) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = {name: value.copy() for name, value in load_file(path).items()}
        save_file(change(tensors) or tensors, path, metadata={"format": "pt"})


def _transpose(tensors: dict[str, np.ndarray]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors |= {name: np.ascontiguousarray(tensors[name].T)} if name in tensors else {}


def _rename(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.replace("model.", "policy."): value for name, value in tensors.items()}


def _layer_0(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in tensors.items() if "layers.0" in name}


def _reshape(tensors: dict[str, np.ndarray]) -> None:
    name = "model.norm.weight"
    tensors |= {name: tensors[name][:-1].copy()} if name in tensors else {}


def _first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def _truncate(folder: Path) -> None:
    _first(folder).write_bytes(_first(folder).read_bytes()[:-100])


BAD: dict[str, Callable[[Path], None]] = {
    "transposed": lambda folder: _edit(folder, _transpose),
    "wrong names": lambda folder: _edit(folder, _rename),
    "one layer": lambda folder: _edit(folder, _layer_0),
    "wrong shape": lambda folder: _edit(folder, _reshape),
    "truncated": _truncate,
    "missing shard": lambda folder: _first(folder).unlink(),
}


class Spoiled:
    """Publishes what is then damaged."""

    def __init__(self, publish: Any, spoil: Callable[[Path], None]):
        self.publish, self.spoil, self.close = publish, spoil, publish.close

    def __call__(self, params: Any, policy_version: int) -> Path:
        folder = self.publish(params, policy_version)
        self.spoil(folder)
        return folder


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_folder_is_refused_and_the_old_weights_serve(name: str, served: Served, engine: SglangEngine) -> None:
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
    name: str, served: Served, engine: SglangEngine
) -> None:
    engine._pool._validate = lambda folder: None
    engine._publish = Spoiled(engine._publish, BAD[name])
    with pytest.raises(EngineError, match="the canary differs by"):
        engine.load(served.policy(2), 2)
    assert sample(engine, ask("c", [3, 4]))[0].policy_version == 1


def test_a_wrong_key_is_one_clear_error(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, told in (("EMPO2_ADMIN_KEY", "pause_generation"), ("EMPO2_API_KEY", "info")):
        monkeypatch.setenv(name, "nonsense")
        engine = served.engine(f"key {name}")
        with pytest.raises(EngineError, match=rf"{told}.*the key in \${name} was refused \(401\)"):
            engine.load(served.policy(1), 1)
        engine.close()
        monkeypatch.setenv(name, KEYS[name])


def test_too_little_room_is_said_before_anything_is_sampled(served: Served) -> None:
    engine = served.engine("room")
    engine._pool._max_length = 20_000_000
    with pytest.raises(ConfigError, match="takes prompts of at most"):
        engine.load(served.policy(1), 1)
    engine.close()


def test_an_over_long_request_fails_alone(served: Served, engine: SglangEngine) -> None:
    engine.max_length = 10**6  # so that it is sent
    good, bad = engine.generate([ask("a", [3, 4]), ask("b", [3] * 100, max_tokens=10**5)])
    assert isinstance(good, Completion) and isinstance(bad, EngineError)
    assert "maximum context length" in str(bad) or "longer" in str(bad)


def test_memory_can_be_given_back_and_taken(served: Served, engine: SglangEngine) -> None:
    engine.release_memory(("kv_cache",))
    engine.resume_memory(("kv_cache",))
    engine.load(served.policy(1), 1)
    assert sample(engine, ask("a", [3, 4]))[0].policy_version == 1


def test_a_run_on_the_toy_world_samples_there_and_learns_here(served: Served) -> None:
    place = served.runs.parent / "toy"
    arguments = train_arguments(place, "--rollout.engine", "sglang", "--rollout.servers", served.url)
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


def test_a_killed_server_comes_back_with_the_current_weights(served: Served, engine: SglangEngine) -> None:
    """Last: it takes as long as a start."""
    engine.load(served.policy(3), 3)
    port = served.url.rsplit(":", 1)[1]
    listing = subprocess.run(["pgrep", "-f", f"sglang_cpu/server.py.*--port {port}"], capture_output=True, text=True)
    for pid in listing.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    request = replace(ask("a", np.arange(3, 30)), session="killed")
    (completion,) = sample(engine, request)
    ids = np.concatenate([request.prompt_ids, completion.ids])
    expected = served.logprobs(served.policy(3), ids)[-len(completion.ids) :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    metrics = engine.metrics()
    assert metrics["engine/taken_out"] == 1 and metrics["engine/reloads"] == 1 and metrics["engine/servers_ready"] == 1
    shutil.rmtree(served.runs, ignore_errors=True)
