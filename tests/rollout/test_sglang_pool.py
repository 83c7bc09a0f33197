"""Many servers as one, against a fake: who is asked, what a death costs, which version is served, who rests."""

import json
import threading
from pathlib import Path

import pytest

from empo2_jax.errors import DataError, EngineError
from empo2_jax.rollout.base import Completion
from empo2_jax.rollout.collect import Assignment
from empo2_jax.types import StopReason
from tests.fixtures.sglang_fake import (
    FakePublish,
    FakeServer,
    ask,
    drop,
    fake_engine,
    only,
    ready,
    reply,
    until,
)
from tests.fixtures.worlds import CorridorFamily, corridor, make_collector, word_tokenizer


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
