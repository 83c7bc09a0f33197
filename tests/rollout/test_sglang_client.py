"""Answers that are none, and faults of one request, against a fake whose good answers were recorded."""

import time
from pathlib import Path

import pytest

from empo2_jax.errors import EngineError
from empo2_jax.rollout.base import Completion
from tests.fixtures.sglang_fake import (
    CONTEXT,
    RECORDED,
    FakeServer,
    ask,
    changed,
    drop,
    fake_engine,
    fake_request,
    hang,
    only,
    ready,
    reply,
    until,
)


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
