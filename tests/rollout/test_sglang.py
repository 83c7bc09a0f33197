"""The engine over rollout servers, against a fake whose answers were recorded from a real one; each fault by itself."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from empo2_jax.errors import ConfigError, DataError, EngineError
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.rollout import sglang
from empo2_jax.rollout.base import Completion, Measured
from empo2_jax.rollout.collect import Assignment
from empo2_jax.rollout.sglang import SglangEngine
from empo2_jax.types import StopReason
from tests.fixtures.sglang_fake import (
    CONTEXT,
    RECORDED,
    VOCAB,
    FakePublish,
    FakeServer,
    changed,
    drop,
    fake_engine,
    fake_request,
    hang,
    reply,
)
from tests.fixtures.worlds import CorridorFamily, corridor, make_collector, word_tokenizer


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


def ask(engine: SglangEngine, *sessions: str) -> list[Completion | EngineError]:
    return engine.generate([fake_request(session) for session in sessions])


def only(engine: SglangEngine, session: str = "a") -> Completion:
    (completion,) = ask(engine, session)
    assert isinstance(completion, Completion), completion
    return completion


def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def ready(engine: SglangEngine) -> float:
    return engine.metrics()["engine/servers_ready"]


def test_ids_logprobs_and_versions_come_through(engine, servers) -> None:
    completion = only(engine)
    label = servers[0].label
    assert label.startswith("1-") and servers[1].label == label
    body = next(body for server in servers for path, body in server.calls if path == "/generate" and "rid" in body)
    assert body["input_ids"] == [3, 4, 5, 6, 7, 8]
    assert body["sampling_params"]["stop_token_ids"] == [5] and body["sampling_params"]["max_new_tokens"] == 6
    high, low = body["sampling_key"]
    assert ((high << 32) | low) % 2**63 == body["sampling_params"]["sampling_seed"]
    assert (np.uint32(high), np.uint32(low)) == tuple(fake_request("a").key)
    expected = [(33 + 3 * index + 7 + body["sampling_params"]["sampling_seed"]) % 23 for index in range(6)]
    expected = expected[: expected.index(5) + 1] if 5 in expected else expected
    assert completion.ids.tolist() == expected
    np.testing.assert_array_equal(completion.logprobs, np.full(len(expected), -0.5, np.float32))
    assert completion.policy_version == 1 and completion.version_spans == ((1, 0, len(expected)),)
    assert completion.finish_reason == ("stop" if 5 in expected else "length")


def test_a_session_stays_with_its_server_and_sessions_spread(engine, servers) -> None:
    for _ in range(3):
        assert all(isinstance(item, Completion) for item in ask(engine, "a", "b", "c", "d"))
    owners = {}
    for index, server in enumerate(servers):
        for path, body in server.calls:
            if path == "/generate" and "rid" in body:
                owners.setdefault(body["sampling_params"]["sampling_seed"], set()).add(index)
    assert sorted(map(len, owners.values())) == [1, 1, 1, 1]
    assert [sum(owner == {index} for owner in owners.values()) for index in (0, 1)] == [2, 2]
    assert only(engine).cached_tokens == 5  # all of the prompt but its last token


def test_requests_in_flight_are_bounded(servers, tmp_path: Path) -> None:
    engine = fake_engine(servers, tmp_path, in_flight=2)
    engine.load(7, 1)
    for server in servers:
        server.delay_s = 0.05
    completions = ask(engine, *map(str, range(12)))
    engine.close()
    assert all(isinstance(item, Completion) for item in completions)
    assert [server.most_running for server in servers] == [2, 2]


def test_a_server_that_is_down_at_the_start_comes_in_later(tmp_path: Path) -> None:
    up, late = FakeServer(), FakeServer()
    port = late.http.server_address[1]
    late.close()
    engine = fake_engine([up, late], tmp_path)
    engine.load(7, 1)
    assert ready(engine) == 1 and only(engine).policy_version == 1
    late = FakeServer(port)
    until(lambda: ready(engine) == 2)
    assert late.label == up.label and late.seed == 7
    engine.close()
    up.close()
    late.close()


def test_no_server_at_all_is_one_clear_error(tmp_path: Path) -> None:
    dead = FakeServer()
    dead.close()
    engine = fake_engine([dead], tmp_path, recovery_s=0.2)
    with pytest.raises(EngineError, match=rf"no rollout server is ready within 0.2 s: {dead.url} does not answer"):
        engine.load(7, 1)
    engine.close()


def test_a_server_that_dies_in_mid_episode_loses_nothing_and_gets_the_version_back(engine, servers) -> None:
    only(engine)
    owner = max(servers, key=lambda server: server.count("/generate"))
    other = servers[1 - servers.index(owner)]
    port = owner.http.server_address[1]
    owner.faults["/generate"] = [drop]
    owner.faults["/ready"] = [drop] * 1000
    assert only(engine).policy_version == 1
    assert other.count("/generate") == 2  # the canary and the rerouted one
    metrics = engine.metrics()
    assert metrics["engine/servers_ready"] == 1 and metrics["engine/retries"] == 1 and metrics["engine/rerouted"] == 1
    owner.close()
    reborn = FakeServer(port)
    servers[servers.index(owner)] = reborn
    until(lambda: ready(engine) == 2)
    assert reborn.label == other.label and reborn.seed == 7  # loaded and checked before it serves
    assert engine.metrics()["engine/canary_abs_diff_max"] < 1e-5


def test_episodes_survive_the_death_of_a_server_under_them(tmp_path: Path) -> None:
    size = word_tokenizer().size
    servers = [FakeServer(vocab=size, context=4000), FakeServer(vocab=size, context=4000)]
    engine = fake_engine(servers, tmp_path)
    engine.load(7, 1)
    for server in servers:
        server.delay_s = 0.02

    def die(handler, body):
        threading.Thread(target=servers[0].close, daemon=True).start()
        return drop(handler, body)

    servers[0].faults["/generate"] = [lambda handler, body: False] * 10 + [die] + [drop] * 99
    collector = make_collector(engine, CorridorFamily(6), retries=0, slots=8)
    episodes = collector.collect([Assignment(f"e{index}", corridor()) for index in range(8)], temperature=1.0)
    collector.close()
    assert [episode.stop_reason for episode in episodes] == [StopReason.DONE] * 8, [e.error for e in episodes]
    assert {step.policy_version for episode in episodes for step in episode.steps} == {1}
    assert ready(engine) == 1
    engine.close()
    servers[1].close()


def test_a_hiccup_costs_no_reload(engine, servers) -> None:
    servers[0].faults["/generate"] = [reply(500, {"error": {"message": "boom"}})]
    servers[1].faults["/generate"] = [reply(500, {"error": {"message": "boom"}})]
    only(engine)
    until(lambda: ready(engine) == 2)
    assert [server.count("/update_weights_from_disk") for server in servers] == [1, 1]


def test_a_server_that_hangs_is_given_up_on_and_told_to_abort(servers, tmp_path: Path) -> None:
    engine = fake_engine(servers, tmp_path, access={"request_s": 1.0})
    engine.load(7, 1)
    began = time.monotonic()
    for server in servers:
        server.faults["/generate"] = [hang(30.0)]
    assert only(engine).policy_version == 1
    assert 0.9 < time.monotonic() - began < 20.0
    until(lambda: any(server.aborted for server in servers))
    engine.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (reply(200, "<html>hello</html>"), "no JSON but '<html>hello</html>'"),
        (reply(200, [1]), "a JSON list, no object"),
        (reply(200, {}), "no meta_info"),
        (changed(lambda answer: answer["meta_info"]["output_token_logprobs"].pop()), "tokens with . log-probs"),
        (changed(lambda answer: answer["meta_info"].pop("weight_version")), "no weight_version"),
        (changed(lambda answer: answer["meta_info"]["output_token_logprobs"][0].__setitem__(0, None)), "not finite"),
        (changed(lambda answer: answer["output_ids"].append(3)), "output_ids; 1 to 6|tokens with . log-probs"),
        (reply(500, {"error": {"message": "out of memory"}}), r"out of memory \(500\)"),
        (drop, "/generate: "),
    ],
)
def test_what_is_no_answer_is_tried_again_and_then_says_why(fault, message, tmp_path: Path) -> None:
    server = FakeServer()
    engine = fake_engine([server], tmp_path, attempts=2)
    engine.load(7, 1)
    server.faults["/generate"] = [fault]
    assert only(engine).policy_version == 1
    server.faults["/generate"] = [lambda handler, body: "rid" in body and fault(handler, body)] * 99
    (failure,) = ask(engine, "b")
    assert isinstance(failure, EngineError)
    assert str(failure).startswith("session 'b': 2 attempts failed, the last: http://127.0.0.1:")
    with pytest.raises(EngineError, match=message):
        raise failure
    engine.close()
    server.close()


def test_one_request_fails_alone(engine, servers) -> None:
    def refuse(handler, body):
        return body["input_ids"] == [4, 4] and reply(400, RECORDED["too_long"]["body"])(handler, body)

    for server in servers:
        server.faults["/generate"] = [refuse] * 9
    good, bad = engine.generate([fake_request("a"), fake_request("b", [4, 4])])
    assert isinstance(good, Completion) and isinstance(bad, EngineError)
    assert "exceeds the model's maximum context length of 32768 tokens" in str(bad)
    assert ready(engine) == 2  # it was the request's fault


def test_busy_servers_are_left_alone_and_asked_again(engine, servers) -> None:
    for server in servers:
        server.faults["/generate"] = [reply(503, {"error": "queue is full"}, retry_after="0")]
    only(engine)
    assert engine.metrics()["engine/taken_out"] == 0


def test_an_aborted_request_is_sampled_again_and_an_unspeakable_id_drawn_anew(engine, servers) -> None:
    def abort(answer):
        answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "bye"}

    def unspeakable(answer):
        answer["output_ids"][0] = answer["meta_info"]["output_token_logprobs"][0][1] = 500

    for fault, draws in ((abort, 1), (unspeakable, 2)):
        for server in servers:
            server.calls.clear()
            server.faults["/generate"] = [changed(fault)]
        engine.release("a")
        only(engine)
        keys = {tuple(body["sampling_key"]) for server in servers for path, body in server.calls if path == "/generate"}
        assert len(keys) == draws
    assert engine.metrics()["engine/taken_out"] == 0


@pytest.mark.parametrize("path", ["/generate", "/pause_generation"])
def test_a_wrong_key_is_named_and_nothing_is_tried_again(path: str, tmp_path: Path) -> None:
    server = FakeServer(api_key="right", admin_key="admin")
    keys = {
        "api_key": "right",
        "admin_key": "admin",
        "admin_key_name": "the key in $ADMIN",
        "api_key_name": "… in $API",
    }
    keys["api_key" if path == "/generate" else "admin_key"] = "wrong"
    engine = fake_engine([server], tmp_path, access=keys)
    name = r"… in \$API" if path == "/generate" else r"the key in \$ADMIN"
    with pytest.raises(EngineError, match=rf"{name} was refused \(401\)") as caught:
        engine.load(7, 1)
    assert "wrong" not in str(caught.value)
    engine.close()
    server.close()


def test_requests_that_cannot_be_served_are_refused_before_they_are_sent(engine, servers) -> None:
    sent = [server.count("/generate") for server in servers]
    for prompt, message in (
        ([3] * CONTEXT, "prompt of 48 tokens; 1 to 47 are allowed"),
        ([], "prompt of 0 tokens"),
        ([3, 23], "token ids 3 to 23; 0 to 22 are allowed"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.generate([fake_request("a"), fake_request("b", prompt)])
    assert [server.count("/generate") for server in servers] == sent


def test_a_server_without_room_for_an_episode_is_refused(tmp_path: Path) -> None:
    server = FakeServer()
    engine = fake_engine([server], tmp_path)
    server.context = 30
    with pytest.raises(ConfigError, match="prompts of at most 24 tokens, episodes with their tip have up to 48"):
        engine.load(7, 1)
    engine.close()
    server.close()


@pytest.fixture
def other_model(tmp_path: Path) -> str:
    """Folder of a model of other shapes."""
    folder = tmp_path / "other model"
    folder.mkdir()
    shapes = Qwen2Config(VOCAB, 32, 2, 2, 1, 8, 32)
    (folder / "config.json").write_text(json.dumps(shapes.to_hf()), encoding="utf-8")
    return str(folder)


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


def test_nothing_is_sampled_before_weights_were_loaded(servers, tmp_path: Path) -> None:
    engine = fake_engine(servers, tmp_path, recovery_s=0.1)
    (failure,) = ask(engine, "a")
    engine.close()
    assert "no weights were loaded" in str(failure)


def test_a_folder_that_is_refused_reaches_no_server(engine, servers, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(FakePublish, "__call__", lambda *_: tmp_path / "empty")
    with pytest.raises(DataError, match=r"no seed\.txt"):
        engine.load(8, 2)
    assert [server.count("/update_weights_from_disk") for server in servers] == [1, 1]
    assert only(engine).policy_version == engine.policy_version == 1


def test_versions_do_not_mix_in_an_episode_unless_allowed(servers, tmp_path: Path) -> None:
    for mixed in (False, True):
        engine = fake_engine(servers, tmp_path / str(mixed), mixed_versions=mixed)
        engine.load(7, 1)
        only(engine)
        engine.load(8, 2)
        (second,) = ask(engine, "a")
        assert isinstance(second, Completion if mixed else EngineError)
        if mixed:
            assert second.policy_version == 2
        else:
            assert "began under version 1 and version 2 is served" in str(second)
            engine.release("a")
            assert only(engine).policy_version == 2
        engine.close()


def test_a_server_that_serves_other_weights_is_caught_and_reloaded(engine, servers) -> None:
    for server in servers:
        server.label, server.seed = "start", 3  # restarted behind our back
    assert only(engine).policy_version == 1
    until(lambda: ready(engine) == 2 or engine.metrics()["engine/stale"] == 0)
    assert servers[0].seed == 7 or servers[1].seed == 7


def test_a_router_serves_completions_and_servers_take_the_weights(servers, tmp_path: Path) -> None:
    router = servers[0]
    engine = fake_engine([servers[0], servers[1]], tmp_path, router=router.url)
    engine.load(7, 1)
    servers[1].calls.clear()
    only(engine)
    assert servers[1].count("/generate") == 0
    servers[0].label = "old"  # a worker behind the router went back
    assert only(engine).policy_version == 1
    assert servers[0].count("/update_weights_from_disk") >= 2
    engine.close()


def test_metrics_come_from_the_pool_and_from_servers_at_work(engine, servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "SCRAPE_S", 0.02)
    assert isinstance(engine, Measured)
    for server in servers:
        server.delay_s = 0.1
        text = RECORDED["metrics"]["body"]
        server.faults["/metrics"] = [reply(200, re.sub(r"(num_running_reqs{.*}) 0\.0", r"\1 3.0", text))] * 99
    ask(engine, "a", "b")
    ask(engine, "a", "b")
    metrics = engine.metrics()
    assert metrics["engine/servers_ready"] == 2 and metrics["engine/canary_abs_diff_max"] < 1e-5
    assert metrics["engine/cached_share"] == pytest.approx(10 / 24, abs=0.3) and metrics["engine/running"] == 6
    assert metrics["engine/cache_hit_rate"] == 0
    assert not [name for name in metrics if "occupancy" in name]
    idle = engine.metrics()
    assert idle["engine/cached_share"] == 0 and "engine/running" not in idle


def test_memory_can_be_given_back_and_taken(engine, servers) -> None:
    for server in servers:
        server.calls.clear()
    engine.release_memory()
    assert all(server.resting and server.label.endswith("/resting") for server in servers)
    (failure,) = ask(engine, "a")
    assert "gave their memory back; weights must be loaded first" in str(failure)
    engine.load(8, 2)
    assert [path for path, _ in servers[1].calls] == [
        *("/flush_cache", "/update_weight_version", "/release_memory_occupation"),
        *("/ready", "/server_info", "/model_info", "/resume_memory_occupation"),
        *("/pause_generation", "/update_weights_from_disk"),
        *("/flush_cache", "/model_info", "/weights_checker", "/continue_generation", "/generate"),
    ]
    assert {json.dumps(body) for path, body in servers[1].calls if "memory" in path} == {
        '{"tags": ["kv_cache", "weights"]}'
    }
    assert only(engine).policy_version == 2


def test_a_trainer_that_died_finds_its_servers_resting_and_wakes_them(engine, servers, tmp_path: Path) -> None:
    engine.release_memory()
    other = fake_engine(servers, tmp_path)
    other.load(7, 1)
    until(lambda: ready(other) == 2)
    assert not any(server.resting for server in servers)
    other.close()


def test_a_server_that_died_while_it_rested_is_loaded_as_a_new_one(engine, servers) -> None:
    engine.release_memory()
    port = servers[1].http.server_address[1]
    servers[1].close()
    servers[1] = FakeServer(port)
    engine.load(8, 2)
    until(lambda: ready(engine) == 2)
    assert servers[1].seed == 8 and servers[1].count("/resume_memory_occupation") == 0


def test_a_server_that_will_not_rest_is_left_out_until_the_next_load(engine, servers) -> None:
    servers[0].faults["/release_memory_occupation"] = [reply(500, {"error": {"message": "no saver"}})]
    servers[0].faults["/resume_memory_occupation"] = [reply(200, "null")]
    engine.release_memory()
    assert ready(engine) == 1
    engine.load(8, 2)
    assert ready(engine) == 2


def test_ctrl_c_ends_a_wait_and_aborts_what_runs(engine, servers) -> None:
    for server in servers:
        server.faults["/generate"] = [hang(30.0)] * 9
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ask(engine, "a", "b", "c")
    until(lambda: sum(len(server.aborted) for server in servers) == 3)


def test_closing_twice_is_fine_and_ends_the_thread(servers, tmp_path: Path) -> None:
    before = threading.active_count()
    engine = fake_engine(servers, tmp_path)
    engine.close()
    engine.close()
    assert threading.active_count() <= before


class Thread:
    """A process of two, as a thread of this one."""

    size = 2

    def __init__(self, process: int, barrier: threading.Barrier, board: list[bytes]) -> None:
        self.process, self._barrier, self._board = process, barrier, board

    def gather(self, call: Callable[[], bytes], what: str) -> list[bytes]:
        self._board[self.process] = call()
        self._barrier.wait(30)
        found = list(self._board)
        self._barrier.wait(30)
        return found

    def first(self, call: Callable[[], Any], what: str) -> Any:
        return json.loads(self.gather(lambda: json.dumps(None if self.process else call()).encode(), what)[0])


def test_of_two_processes_one_loads_and_nurses_and_both_sample(servers, tmp_path: Path) -> None:
    barrier, board = threading.Barrier(2), [b"", b""]
    engines = [fake_engine(servers, tmp_path, processes=Thread(process, barrier, board)) for process in (0, 1)]

    def both(call: Callable[[SglangEngine], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(call, engines))

    both(lambda engine: engine.load(7, 1))
    assert [server.count("/update_weights_from_disk") for server in servers] == [1, 1]
    assert [server.count("/generate") for server in servers] == [2, 2]  # the canary of each
    for completions in both(lambda engine: ask(engine, *(f"{id(engine)} {index}" for index in range(4)))):
        assert all(isinstance(item, Completion) and item.policy_version == 1 for item in completions)
    assert [metrics["engine/servers_ready"] for metrics in both(lambda engine: engine.metrics())] == [2, 2]

    # A server that starts again while the first process asks it nothing is loaded by it all the same.
    servers[1].label, servers[1].seed = "start", 3
    assert all(isinstance(item, Completion) for item in ask(engines[1], "a", "b"))
    until(lambda: servers[1].seed == 7)
    until(lambda: all(len(engine._pool.ready) == 2 for engine in engines))
    assert servers[1].count("/update_weights_from_disk") == 2
    figures = both(lambda engine: engine.metrics())
    assert figures[0]["engine/stale"] == figures[1]["engine/stale"] == 1  # seen by one, told by both
    both(lambda engine: engine.release_memory())
    assert [server.count("/release_memory_occupation") for server in servers] == [1, 1]
    both(lambda engine: engine.load(8, 2))
    assert all(only(engine, f"new {id(engine)}").policy_version == 2 for engine in engines)
    both(lambda engine: engine.close())


def test_closing_ends_what_another_thread_waits_for(engine, servers) -> None:
    for server in servers:
        server.faults["/generate"] = [hang(30.0)] * 9
    before = sum(server.count("/generate") for server in servers)
    with ThreadPoolExecutor(max_workers=1) as threads:
        waiting = threads.submit(ask, engine, "a")
        until(lambda: sum(server.count("/generate") for server in servers) > before)
        began = time.monotonic()
        engine.close()
        assert isinstance(waiting.exception(timeout=20), CancelledError)
    assert time.monotonic() - began < 10
    engine.release("a")  # as a collector does on its way out
