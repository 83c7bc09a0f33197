"""A real server process over real HTTP, against the engine and the training forward pass of this process."""

import asyncio
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from empo2_jax.models.hf_weights import load_model
from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.randomness import words
from empo2_jax.rollout.base import Request, Sampling
from empo2_jax.rollout.jax_engine import JaxEngine
from tests.fixtures.processes import LIMIT_S, empo2
from tests.fixtures.servers import CONFIG, running_server, tiny_folder, tiny_model, tiny_prompt, training_logprobs

pytestmark = pytest.mark.medium
SLOTS, LONG = 4, 480  # tokens: long enough to be caught in the act


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("serve") / "model")


@pytest.fixture(scope="module")
def other_folder(folder):
    return tiny_folder(folder.parent / "other", seed=1)


@pytest.fixture(scope="module")
def running(folder):
    with running_server(folder, "--slots", str(SLOTS), "--burst", "2", "--weight-version", "v0") as server:
        yield server


@pytest.fixture
def server(running, folder):
    """The server, not paused, with the first weights and an empty cache."""
    yield running
    running.post("/abort_request", abort_all=True)
    running.post("/continue_generation")
    response = running.post("/update_weights_from_disk", model_path=str(folder), weight_version="v0")
    assert response.status_code == 200, response.text


@pytest.fixture(scope="module")
def engine():
    return JaxEngine(tiny_model(), slots=SLOTS, max_length=CONFIG.max_position_embeddings)


@pytest.fixture(scope="module")
def models():
    return {"v0": tiny_model(0), "v1": tiny_model(1)}


def outputs(reply):
    return reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


def inputs(reply):
    return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"]]


class InFlight:
    """A request that a thread waits for."""

    def __init__(self, server, prompt, **fields):
        self.prompt = prompt
        self._pool = ThreadPoolExecutor(1)
        self._reply = self._pool.submit(server.generate, prompt, ignore_eos=True, **fields)
        before = server.metrics()["sglang:generation_tokens_total"]
        deadline = time.monotonic() + LIMIT_S
        while server.metrics()["sglang:generation_tokens_total"] <= before:
            assert time.monotonic() < deadline and not self._reply.done()

    def reply(self):
        self._pool.shutdown()
        return self._reply.result(LIMIT_S)


def test_answers_equal_those_of_the_engine_in_process(server, engine, folder):
    tokenizer = Tokenizer.load(folder)
    for draw, (temperature, top_p) in enumerate([(1.0, 1.0), (0.4, 1.0), (0.0, 1.0), (1.3, 0.6)]):
        prompt, key = tiny_prompt(30 + draw, seed=draw), words(draw, "test")
        sampling = Sampling(20, temperature, tokenizer.stop_ids, top_p, banned_from=tokenizer.size)
        (expected,) = engine.generate([Request(f"s{draw}", np.asarray(prompt, np.int32), key, sampling)])
        reply = server.generate(
            prompt, max_new_tokens=20, temperature=temperature, top_p=top_p, sampling_key=key.tolist()
        )
        ids, logprobs = outputs(reply)
        assert ids == expected.ids.tolist() and max(ids) < tokenizer.size
        np.testing.assert_array_equal(np.asarray(logprobs, np.float32), expected.logprobs)
        assert reply["text"] == tokenizer.decode(ids)  # without special tokens, so without the stop token
        assert reply["meta_info"]["finish_reason"]["type"] == ("stop" if expected.stopped else "length")


def test_a_seed_repeats_its_sample_and_a_stop_id_ends_it(server):
    sample = lambda **fields: outputs(server.generate(tiny_prompt(9), max_new_tokens=12, ignore_eos=True, **fields))[0]  # noqa: E731
    first = sample(sampling_seed=5)
    assert sample(sampling_seed=5) == first != sample(sampling_seed=6)
    assert sample() != sample()
    stopped = server.generate(tiny_prompt(9), max_new_tokens=12, sampling_seed=5, stop_token_ids=[first[3]])
    assert stopped["output_ids"] == first[: first.index(first[3]) + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": first[3]}


@pytest.mark.parametrize("length", [1, 2, 17, 300, 512])
def test_scores_equal_the_training_forward(server, models, length):
    prompt = tiny_prompt(length, seed=length)
    expected = training_logprobs(models["v0"], prompt)
    reply = server.generate(prompt, max_new_tokens=0, logprob_start_len=0, temperature=0.5)
    assert (reply["output_ids"], reply["meta_info"]["completion_tokens"]) == ([], 0)
    assert [entry[1] for entry in reply["meta_info"]["input_token_logprobs"]] == prompt
    first, *scores = inputs(reply)
    assert first is None
    np.testing.assert_allclose(scores, expected, atol=1e-5, rtol=0)
    for start in sorted({length // 2, length - 1}):  # now partly from the cache
        reply = server.generate(prompt, max_new_tokens=min(1, 512 - length), logprob_start_len=start)
        assert reply["meta_info"]["cached_tokens"] == (start if start >= 16 and 2 * start >= length else 0)
        np.testing.assert_allclose(inputs(reply)[1:], expected[start:], atol=1e-5, rtol=0)


def test_a_growing_conversation_is_served_from_its_cache(server, models):
    ids = tiny_prompt(40)
    for turn in range(3):
        reply = server.generate(ids, max_new_tokens=6, ignore_eos=True)
        assert reply["meta_info"]["cached_tokens"] == (0 if turn == 0 else len(ids) - 6)
        sampled, logprobs = outputs(reply)
        expected = training_logprobs(models["v0"], [*ids, *sampled])[len(ids) - 1 :]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5, rtol=0)
        ids = [*ids, *sampled, *tiny_prompt(5, seed=turn)]


def test_thirty_two_requests_of_odd_sizes_at_once_are_all_right(server, models):
    rng = np.random.default_rng(0)
    trunk = tiny_prompt(60)
    prompts = [trunk[: rng.integers(1, 60)] + tiny_prompt(int(rng.integers(1, 90)), seed=n) for n in range(32)]
    params = [
        {
            "max_new_tokens": int(rng.integers(0, 40)),
            "temperature": float(rng.choice([0.0, 0.7, 1.0])),
            "sampling_seed": n,
        }
        for n in range(32)
    ]

    async def all_at_once():
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, trust_env=False) as client:
            bodies = [
                {"input_ids": ids, "sampling_params": wanted, "return_logprob": True, "logprob_start_len": 0}
                for ids, wanted in zip(prompts, params, strict=True)
            ]
            return [
                response.json()
                for response in await asyncio.gather(*(client.post("/generate", json=b) for b in bodies))
            ]

    for prompt, wanted, reply in zip(prompts, params, asyncio.run(all_at_once()), strict=True):
        ids, logprobs = outputs(reply)
        reason = reply["meta_info"]["finish_reason"]["type"]
        assert len(ids) == wanted["max_new_tokens"] or reason == "stop"
        plain = training_logprobs(models["v0"], [*prompt, *ids])
        np.testing.assert_allclose(inputs(reply)[1:], plain[: len(prompt) - 1], atol=1e-5, rtol=0)
        scaled = training_logprobs(models["v0"], [*prompt, *ids], wanted["temperature"] or 1.0)
        np.testing.assert_allclose(logprobs, scaled[len(prompt) - 1 :], atol=1e-5, rtol=0)
        alone = server.generate(prompt, **wanted)
        assert alone["output_ids"] == ids
    assert server.metrics()["sglang:num_running_reqs"] == 0


def test_an_abort_is_a_reply_with_what_there_is(server):
    one = InFlight(server, tiny_prompt(9), max_new_tokens=LONG, rid="mine", sampling_seed=1)
    assert server.post("/abort_request", rid="other").status_code == 200
    assert server.post("/abort_request", rid="mine").status_code == 200
    reply = one.reply()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    ids, logprobs = outputs(reply)
    assert 0 < len(ids) == len(logprobs) < LONG
    whole = server.generate(one.prompt, max_new_tokens=len(ids), sampling_seed=1, ignore_eos=True)
    assert whole["output_ids"] == ids


def test_a_client_that_goes_away_is_no_longer_served(server):
    aborted = server.metrics()["sglang:num_aborted_requests_total"]
    body = {"input_ids": tiny_prompt(9), "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/generate", json=body, timeout=httpx.Timeout(LIMIT_S, read=0.1), trust_env=False)
    deadline = time.monotonic() + LIMIT_S
    while server.metrics()["sglang:num_running_reqs"]:
        assert time.monotonic() < deadline
    assert server.metrics()["sglang:num_aborted_requests_total"] == aborted + 1


def test_requests_wait_while_the_server_is_paused(server):
    assert server.post("/pause_generation", mode="abort").json()["status"] == "ok"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.generate, tiny_prompt(9), max_new_tokens=2)
        while not server.metrics()["sglang:num_queue_reqs"]:
            time.sleep(0.01)
        time.sleep(0.1)
        assert not waiting.done()
        assert server.post("/continue_generation").json()["status"] == "ok"
        assert len(waiting.result(LIMIT_S)["output_ids"]) <= 2


def test_retracted_requests_go_on_under_new_weights_with_recomputed_keys(server, models, other_folder):
    one = InFlight(server, tiny_prompt(30), max_new_tokens=LONG)
    server.post("/pause_generation", mode="retract")
    response = server.post("/update_weights_from_disk", model_path=str(other_folder), weight_version="v1")
    assert response.status_code == 200, response.text
    server.post("/continue_generation")
    reply = one.reply()
    spans = [(span["version"], span["start"], span["end"]) for span in reply["meta_info"]["weight_versions"]]
    ids, logprobs = outputs(reply)
    assert [span[0] for span in spans] == ["v0", "v1"] and (spans[0][1], spans[1][2]) == (0, LONG)
    assert reply["meta_info"]["weight_version"] == "v1"
    for version, start, end in spans:
        expected = training_logprobs(models[version], [*one.prompt, *ids])[len(one.prompt) - 1 :]
        np.testing.assert_allclose(logprobs[start:end], expected[start:end], atol=1e-5, rtol=0)


def test_requests_paused_in_place_keep_their_keys_or_forbid_the_update(server, models, other_folder):
    one = InFlight(server, tiny_prompt(30), max_new_tokens=LONG)
    server.post("/pause_generation", mode="in_place")
    update = {"model_path": str(other_folder), "weight_version": "v1"}
    refused = server.post("/update_weights_from_disk", **update)
    assert refused.status_code == 400 and "1 requests are paused in place" in refused.json()["message"]
    assert server.http.get("/model_info").json()["weight_version"] == "v0"
    assert server.post("/flush_cache").status_code == 400
    assert server.post("/update_weights_from_disk", **update, flush_cache=False).status_code == 200
    server.post("/continue_generation")
    reply = one.reply()
    assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == ["v0", "v1"]
    again = server.generate(one.prompt, max_new_tokens=0, logprob_start_len=0)  # nothing stale is lent to others
    assert again["meta_info"]["cached_tokens"] == 0
    np.testing.assert_allclose(inputs(again)[1:], training_logprobs(models["v1"], one.prompt), atol=1e-5, rtol=0)


def test_an_update_waits_for_running_requests(server, models, other_folder):
    one = InFlight(server, tiny_prompt(30), max_new_tokens=LONG)
    response = server.post("/update_weights_from_disk", model_path=str(other_folder), weight_version="v1")
    assert response.status_code == 200, response.text
    assert [span["version"] for span in one.reply()["meta_info"]["weight_versions"]] == ["v0"]
    scored = server.generate(one.prompt, max_new_tokens=0, logprob_start_len=0)
    np.testing.assert_allclose(inputs(scored)[1:], training_logprobs(models["v1"], one.prompt), atol=1e-5, rtol=0)


def test_a_flush_forgets_prefixes(server):
    prompt = tiny_prompt(40)
    server.generate(prompt, max_new_tokens=1)
    assert server.generate(prompt, max_new_tokens=1)["meta_info"]["cached_tokens"] == 39
    assert server.post("/flush_cache").status_code == 200
    assert server.generate(prompt, max_new_tokens=1)["meta_info"]["cached_tokens"] == 0


def test_memory_is_given_back_and_taken_and_never_touched_between(server, models, other_folder):
    prompt = tiny_prompt(40)
    before = server.post("/weights_checker", action="checksum").json()
    names = before["ranks"][0]["checksums"]
    assert names.keys() == load_file(other_folder / "model.safetensors").keys()
    assert server.post("/release_memory_occupation").status_code == 200
    refused = server.http.post("/generate", json={"input_ids": prompt})
    assert refused.status_code == 400 and "were given back" in refused.json()["error"]["message"]
    assert server.post("/weights_checker").status_code == 400
    assert server.post("/resume_memory_occupation").status_code == 200
    refused = server.http.post("/generate", json={"input_ids": prompt})
    assert refused.status_code == 400 and "new ones must be loaded first" in refused.json()["error"]["message"]
    response = server.post("/update_weights_from_disk", model_path=str(other_folder), weight_version="v1")
    assert response.status_code == 200, response.text
    scored = server.generate(prompt, max_new_tokens=0, logprob_start_len=0)
    np.testing.assert_allclose(inputs(scored)[1:], training_logprobs(models["v1"], prompt), atol=1e-5, rtol=0)
    after = server.post("/weights_checker").json()["ranks"][0]["checksums"]
    # Of the first weights all differ but the norms, which begin as ones, and the biases, which begin as zeros.
    assert {name for name in names if after[name] == names[name]} == {
        name for name in names if "norm" in name or name.endswith("bias")
    }


def broken_folders(place: Path):
    """Folders that must not be served, with what is said about each."""

    def changed(name, change, message):
        folder = tiny_folder(place / name, seed=1)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder), message

    norm = "model.norm.weight"
    yield str(place / "nowhere"), "cannot be read: No such file"
    yield changed("missing", lambda tensors: tensors.pop(norm), f"tensor {norm} is missing")
    yield changed("name", lambda tensors: tensors.update({"x": tensors.pop(norm)}), "tensor x is unknown")
    yield changed("shape", lambda tensors: tensors.update({norm: tensors[norm][:-1]}), f"tensor {norm} has shape")
    truncated = tiny_folder(place / "truncated", seed=1)
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    yield str(truncated), "truncated"
    other = tiny_folder(place / "architecture", seed=1)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    yield str(other), "rope_theta 5.0"
    (place / "file").write_text("x")
    yield str(place / "file"), "Not a directory"


def test_a_folder_that_cannot_be_served_changes_nothing(server, models, tmp_path):
    prompt = tiny_prompt(20)
    for folder, message in broken_folders(tmp_path):
        response = server.post("/update_weights_from_disk", model_path=folder, weight_version="v9")
        assert (response.status_code, response.json()["success"]) == (400, False)
        assert message in response.json()["error"]["message"]
        assert "the old ones are served" in response.json()["message"]
    assert server.http.get("/model_info").json()["weight_version"] == "v0"
    scores = inputs(server.generate(prompt, max_new_tokens=0, logprob_start_len=0))[1:]
    np.testing.assert_allclose(scores, training_logprobs(models["v0"], prompt), atol=1e-5, rtol=0)


def test_what_is_served_is_told(server, folder):
    assert server.http.get("/ready").status_code == server.http.get("/health").status_code == 200
    info = server.http.get("/model_info").json()
    assert (info["model_path"], info["weight_version"]) == (str(folder), "v0")
    settings = server.http.get("/get_server_info").json()
    assert (settings["dtype"], settings["context_length"], settings["max_running_requests"]) == ("float32", 512, SLOTS)


def test_a_bf16_checkpoint_is_served_as_such_and_requests_end_within_the_grace(tmp_path):
    folder = tiny_folder(tmp_path / "half", dtype=jnp.bfloat16)
    engine = JaxEngine(load_model(folder, dtype=jnp.bfloat16), slots=SLOTS, max_length=512)  # with weights in f32
    sampling = Sampling(20, 1.0, (), banned_from=Tokenizer.load(folder).size)
    (expected,) = engine.generate([Request("s", np.asarray(tiny_prompt(30), np.int32), words(3, "serve"), sampling)])
    with running_server(folder, "--slots", str(SLOTS), "--burst", "2", key="secret") as server:
        assert httpx.get(f"{server.url}/model_info", trust_env=False).status_code == 401
        assert server.http.get("/server_info").json()["dtype"] == "bfloat16"
        reply = server.generate(tiny_prompt(30), max_new_tokens=20, sampling_seed=3, ignore_eos=True)
        assert outputs(reply)[0] == expected.ids.tolist()
        np.testing.assert_array_equal(np.asarray(outputs(reply)[1], np.float32), expected.logprobs)
        one = InFlight(server, tiny_prompt(9), max_new_tokens=100)
        assert server.stop(signal.SIGTERM) == (0, "")
        assert len(one.reply()["output_ids"]) == 100


def test_requests_beyond_the_grace_are_given_back_as_they_are(folder):
    with running_server(folder, "--slots", "4", "--burst", "1", "--grace", "0") as server:
        server.post("/pause_generation", mode="in_place")
        replies = []
        asker = threading.Thread(target=lambda: replies.append(server.generate(tiny_prompt(9), max_new_tokens=5)))
        asker.start()
        while not server.metrics()["sglang:num_queue_reqs"]:
            time.sleep(0.01)
        assert server.stop(signal.SIGINT) == (0, "")
        asker.join(LIMIT_S)
        assert replies[0]["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_taken_port_and_an_open_host_without_a_key_are_mistakes(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = empo2("serve", str(folder), "--port", str(port))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: --host 127.0.0.1 --port {port}: cannot be had: Address already in use\n"
    result = empo2("serve", str(folder), "--port", "0", "--host", "0.0.0.0")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--api-key" in result.stderr and result.stderr.count("\n") == 1
