"""Never stale: what a load proves, and what happens to a server that cannot prove it."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from empo2_jax.errors import DataError, EngineError
from empo2_jax.rollout.base import Completion
from empo2_jax.rollout.sglang_client import Access, SglangServer
from empo2_jax.rollout.weights import Canary, Outcome, _compare
from tests.fixtures.sglang_fake import RECORDED, FakeServer, changed, drop, fake_engine, fake_request, reply

UPDATE = "/update_weights_from_disk"


@pytest.fixture
def servers():
    started = [FakeServer(), FakeServer(), FakeServer()]
    yield started
    for server in started:
        server.close()


def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def ready(engine) -> int:
    return int(engine.metrics()["engine/servers_ready"])


def served_by(engine, count: int = 6) -> set[int]:
    """Versions that sampled some completions."""
    completions = engine.generate([fake_request(f"s{index}") for index in range(count)])
    for index in range(count):
        engine.release(f"s{index}")
    assert all(isinstance(item, Completion) for item in completions), completions
    return {item.policy_version for item in completions}


def lied(handler, body) -> bool:
    """200 and the new label for a load that did nothing."""
    handler.server.fake.label = body["weight_version"]
    return reply(200, RECORDED["update"]["body"])(handler, body)


def test_a_load_pauses_updates_flushes_reads_back_continues_and_scores(engine, servers) -> None:
    for server in servers:
        server.calls.clear()
    engine.load(8, 2)
    for server in servers:
        paths = [path for path, _ in server.calls]
        assert paths == [
            *("/ready", "/server_info", "/model_info", "/pause_generation", UPDATE, "/flush_cache", "/model_info"),
            *("/weights_checker", "/continue_generation", "/generate"),
        ]
        body = dict(server.calls)[UPDATE]
        assert (
            body["flush_cache"] is True and body["weight_version"] == server.label and Path(body["model_path"]).is_dir()
        )
        score = server.calls[-1][1]
        assert score["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0} and score["logprob_start_len"] == 0
        assert not server.paused and server.seed == 8
    assert served_by(engine) == {2}


def test_one_version_number_with_other_weights_has_another_label(engine, servers) -> None:
    first = servers[0].label
    engine.load(9, 1)  # a run that went back to a checkpoint
    assert servers[0].label != first and servers[0].label.startswith("1-")


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        (UPDATE, lied),
        (UPDATE, reply(400, RECORDED["update_absent"]["body"])),
        (UPDATE, reply(200, {"success": False, "message": "no"})),
        ("/model_info", changed(lambda info: info.__setitem__("weight_version", "old"))),
        ("/weights_checker", changed(lambda sums: sums["ranks"][0].__setitem__("per_gpu_checksum", "f" * 64))),
        ("/generate", changed(lambda answer: answer["meta_info"]["input_token_logprobs"][4].__setitem__(0, -3.0))),
        ("/generate", changed(lambda answer: answer["meta_info"].__setitem__("weight_version", "old"))),
        ("/pause_generation", reply(500, {"error": {"message": "no"}})),
    ],
    ids=["did-not-happen", "refused", "unsuccessful", "version", "checksum", "canary", "label", "pause"],
)
def test_a_server_that_did_not_take_the_weights_is_out_until_it_has(path: str, fault, engine, servers) -> None:
    servers[1].faults[path] = [fault]
    if path == "/model_info":  # the first call only asks whether the server rests
        servers[1].faults[path].insert(0, lambda handler, body: False)
    servers[1].calls.clear()
    engine.load(8, 2)
    assert served_by(engine) == {2}
    until(lambda: ready(engine) == 3)
    loads = [Path(body["model_path"]).name for called, body in servers[1].calls if called == UPDATE]
    assert loads[-1] == "v2-8" and "v1-7" in loads  # the last good version before it was tried again
    assert servers[1].seed == 8 and not any(server.paused for server in servers)


def test_a_load_that_all_refuse_leaves_the_last_good_version_serving(engine, servers) -> None:
    for server in servers:
        server.faults[UPDATE] = [lied]
    with pytest.raises(EngineError, match=r"no server took version 2 over: .* the canary differs by .* nats"):
        engine.load(8, 2)
    assert [server.seed for server in servers] == [7, 7, 7] and not any(server.paused for server in servers)
    assert all(server.label.startswith("1-") for server in servers)
    assert served_by(engine) == {1} and engine.policy_version == 1


@pytest.mark.parametrize("liar", [0, 1])
def test_of_two_servers_one_that_kept_its_weights_does_not_outvote_the_other(liar: int, tmp_path: Path) -> None:
    servers = [FakeServer(), FakeServer()]
    engine = fake_engine(servers, tmp_path)
    engine.load(7, 1)
    servers[liar].faults[UPDATE] = [lied] * 9
    engine.load(8, 2)
    assert served_by(engine) == {2} and servers[1 - liar].count(UPDATE) == 2
    engine.close()
    for server in servers:
        server.close()


def test_servers_that_name_other_tensors_are_not_compared() -> None:
    def checksums(server: str) -> dict[str, Any]:
        names = ["qkv"] if server == "sglang" else ["q", "k", "v"]
        return {"ranks": [{"checksums": {name: f"{server} {name}" for name in names}}]}

    members = [SglangServer(f"http://{name}", Access()) for name in ("ours", "sglang", "other")]
    outcome = Outcome()
    sums = dict(zip(members, map(checksums, ("ours", "sglang", "ours")), strict=True))
    _compare(sums, outcome)
    assert not outcome.failures and len(outcome.checksums) == 2
    sums[members[2]]["ranks"][0]["checksums"]["k"] = "wrong"
    again = Outcome(checksums=outcome.checksums)
    _compare(sums, again)
    assert list(again.failures) == [members[2]]


def test_a_server_that_never_gets_it_right_stays_out_and_paused(engine, servers) -> None:
    servers[2].faults["/generate"] = [
        changed(lambda answer: answer["meta_info"]["input_token_logprobs"][4].__setitem__(0, -3.0))
    ] * 50
    engine.load(8, 2)
    until(lambda: all(nurse.done() for nurse in engine._pool._nurses()))
    assert servers[2].count(UPDATE) == 2 + 2 * 2  # loads of the trainer, then two tries, each after the old one
    assert servers[2].paused and ready(engine) == 2
    assert served_by(engine) == {2}
    servers[2].faults.clear()
    engine.load(9, 3)  # the next version is a new chance
    assert ready(engine) == 3 and not servers[2].paused


def test_a_server_that_dies_of_a_load_gets_the_folder_again_only_after_it_was_checked(tmp_path: Path) -> None:
    server, checked = FakeServer(), []
    engine = fake_engine([server], tmp_path, recovery_s=3.0)
    validate = engine._pool._validate
    engine._pool._validate = lambda folder: (checked.append(folder.name), validate(folder))
    engine.load(7, 1)
    server.faults[UPDATE] = [drop]
    engine.load(8, 2)  # waits for it to come back
    assert checked == ["v1-7", "v2-8", "v2-8"] and server.seed == 8
    server.faults[UPDATE] = [drop] * 99
    with pytest.raises(EngineError, match=rf"no rollout server is ready within 3 s: {server.url} could not be brought"):
        engine.load(9, 3)
    assert len([body for path, body in server.calls if path == UPDATE and "v3-9" in body["model_path"]]) == 3
    engine.close()
    server.close()


def test_a_folder_that_went_bad_is_not_loaded_into_a_server_that_comes_back(tmp_path: Path) -> None:
    server = FakeServer()
    engine = fake_engine([server], tmp_path, recovery_s=1.0)
    engine.load(7, 1)
    (tmp_path / "v1-7" / "seed.txt").unlink()
    server.label, count = "start", server.count(UPDATE)
    (failure,) = engine.generate([fake_request("a")])
    assert isinstance(failure, EngineError) and "no seed.txt" in str(failure)
    assert server.count(UPDATE) == count
    with pytest.raises(DataError, match=r"no seed\.txt"):
        engine._pool._validate(tmp_path / "v1-7")
    engine.close()
    server.close()


def test_the_gap_is_the_largest_difference() -> None:
    canary = Canary(np.arange(4, dtype=np.int32), np.array([-1, -2, -3], np.float32), 1e-4)
    assert canary.gap(np.array([-1, -2.5, -3.25], np.float32)) == 0.5
