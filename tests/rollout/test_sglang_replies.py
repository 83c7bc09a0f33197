"""Answers are believed only where they fit together; recorded ones from a real server do."""

import copy
import json

import numpy as np
import pytest

from empo2_jax.rollout.sglang_replies import (
    Busy,
    ServerFault,
    Span,
    Unspeakable,
    error_text,
    parse_completion,
    parse_metrics,
    parse_object,
    parse_score,
)
from tests.fixtures.sglang_fake import RECORDED

GENERATE, SCORE = RECORDED["generate"]["body"], RECORDED["score"]["body"]


def test_a_recorded_completion() -> None:
    reply = parse_completion("here", GENERATE, max_tokens=6, vocab_size=190)
    assert reply.ids.tolist() == [159, 119, 178, 159, 22, 20] and reply.ids.dtype == np.int32
    expected = [-0.9337708, -1.8325434, -0.2283691, -0.2442779, -0.9070115, -1.4620004]
    np.testing.assert_allclose(reply.logprobs, expected, rtol=1e-6)
    assert (reply.stopped, reply.cached_tokens, reply.spans) == (False, 0, (Span("start", 0, 6),))


def test_a_recorded_score() -> None:
    logprobs, label = parse_score("here", SCORE, np.arange(3, 20, dtype=np.int32))
    assert label == "start" and len(logprobs) == 16
    np.testing.assert_allclose(logprobs[:3], [-11.375194, -4.721271, -5.114973], rtol=1e-6)
    with pytest.raises(ServerFault, match="log-probs of 17 tokens, which are not the 16 sent"):
        parse_score("here", SCORE, np.arange(3, 19, dtype=np.int32))


def test_versions_of_a_completion_that_was_paused() -> None:
    answer = copy.deepcopy(GENERATE)
    answer["meta_info"]["weight_versions"] = [
        {"version": "v1", "start": 0, "end": 4},
        {"version": "v3", "start": 4, "end": 6},
    ]
    assert parse_completion("here", answer, 6, 190).spans == (Span("v1", 0, 4), Span("v3", 4, 6))
    answer["meta_info"]["weight_versions"].pop()
    with pytest.raises(ServerFault, match="do not cover 6 tokens"):
        parse_completion("here", answer, 6, 190)
    del answer["meta_info"]["weight_versions"]  # an older server
    assert parse_completion("here", answer, 6, 190).spans == (Span("start", 0, 6),)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("finish_reason", None, "finish_reason None"),
        ("finish_reason", {"type": "tired"}, "tired"),
        ("output_token_logprobs", None, "no list output_token_logprobs"),
        ("output_token_logprobs", [[-1.0, 159, None]], "6 tokens with 1 log-probs"),
        ("output_token_logprobs", [[-1.0, 1, None]] * 6, "log-probs of other tokens"),
        ("output_token_logprobs", [[0.5, token, None] for token in GENERATE["output_ids"]], "above 0"),
        ("output_token_logprobs", [["x", token, None] for token in GENERATE["output_ids"]], "missing"),
        ("weight_version", None, "no weight_version"),
        ("weight_versions", [{"version": "a"}], "weight_versions"),
    ],
)
def test_what_does_not_fit_together_is_the_servers_fault(key: str, value: object, message: str) -> None:
    answer = copy.deepcopy(GENERATE)
    answer["meta_info"][key] = value
    with pytest.raises(ServerFault, match=f"here: not an answer of SGLang: .*{message}"):
        parse_completion("here", answer, 6, 190)


def test_too_many_tokens_aborts_and_ids_without_text() -> None:
    with pytest.raises(ServerFault, match="6 output_ids; 1 to 5 were asked for"):
        parse_completion("here", GENERATE, 5, 190)
    with pytest.raises(Unspeakable, match="sampled id 178, which has no text; 0 to 177 are allowed"):
        parse_completion("here", GENERATE, 6, 178)
    answer = copy.deepcopy(GENERATE)
    answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
    with pytest.raises(Busy, match="here: the request was aborted: Abort in waiting queue"):
        parse_completion("here", answer, 6, 190)


def test_a_log_prob_that_rounding_lifted_over_zero_is_zero() -> None:
    answer = copy.deepcopy(GENERATE)
    answer["meta_info"]["output_token_logprobs"][0][0] = 1e-6
    assert parse_completion("here", answer, 6, 190).logprobs[0] == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("too_long", "Requested token count exceeds the model's maximum context length of 32768 tokens"),
        ("bad_key", "unknown field `nonsense`"),
        ("bad_type", "3 validation errors: {'type': 'value_error'"),
        ("update_absent", "Failed to get weights iterator"),
        ("unknown_path", "Not Found"),
    ],
)
def test_every_recorded_shape_of_an_error_has_its_message(name: str, expected: str) -> None:
    text = error_text(json.dumps(RECORDED[name]["body"]))
    assert text.startswith(expected) and "\n" not in text and len(text) <= 300


def test_errors_that_are_no_json() -> None:
    assert error_text("<h1>Bad\n gateway</h1>") == "<h1>Bad gateway</h1>"
    assert error_text("") == "no message"
    assert parse_object("here", "") == {}
    with pytest.raises(ServerFault, match=r"here: not an answer of SGLang: no JSON but 'Traceback"):
        parse_object("here", "Traceback (most recent call last)")


def test_prometheus_text_is_summed_over_labels() -> None:
    text = (
        '# HELP a A.\na{x="1"} 2.0\na{x="2",y="}"} 3.5\nb 4\nc_bucket{le="1"} 9\nd NaN\ne nonsense\n\nf 1 1700000000\n'
    )
    assert parse_metrics(text) == {"a": 5.5, "b": 4.0, "f": 1.0}
    recorded = parse_metrics(RECORDED["metrics"]["body"])
    assert recorded["sglang:num_running_reqs"] == 0 and "sglang:fwd_occupancy" not in recorded
