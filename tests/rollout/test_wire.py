import json
from itertools import count

import numpy as np
import pytest

from empo2_jax.errors import EngineError
from empo2_jax.randomness import words
from empo2_jax.rollout.wire import Asked, Model, parse_generate, reply

MODEL = Model(vocab_size=40, token_count=38, max_length=32, stop_ids=(1, 2))


def asked(**body):
    numbers = count()
    fresh = lambda: (f"own{(number := next(numbers))}", words(number, "fresh"))  # noqa: E731
    return parse_generate(json.dumps({"input_ids": [3, 4], **body}).encode(), MODEL, fresh)


def one(**params):
    (job,), several = asked(sampling_params={"max_new_tokens": 8} | params)
    assert not several
    return job.job.request


def test_parameters_become_sampling():
    request = one(temperature=0.5, top_p=0.9, stop_token_ids=[7, 1])
    assert request.prompt_ids.tolist() == [3, 4] and request.prompt_ids.dtype == np.int32
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.banned_from) == (8, 0.5, 0.9, 38)
    assert sampling.stop_ids == (7, 1, 2)
    assert one(ignore_eos=True, stop_token_ids=[7]).sampling.stop_ids == ()
    assert one(temperature=1e-7).sampling.temperature == 0.0
    assert one(top_k=-1, n=1, stop=[], min_p=0, skip_special_tokens=True).sampling.stop_ids == (1, 2)


def test_the_key_is_that_of_the_seed_or_given_or_new():
    np.testing.assert_array_equal(one(sampling_seed=5).key, words(5, "serve"))
    np.testing.assert_array_equal(one().key, words(0, "fresh"))
    (job,), _ = asked(sampling_params={"max_new_tokens": 1}, sampling_key=[7, 2**32 - 1])
    assert job.job.request.key.tolist() == [7, 2**32 - 1]


def test_a_list_of_prompts_takes_one_value_or_one_for_each():
    jobs, several = asked(
        input_ids=[[3], [4, 5]],
        rid="r",
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        return_logprob=True,
        logprob_start_len=[0, -1],
        sampling_key=[[1, 2], [3, 4]],
    )
    assert several and [job.rid for job in jobs] == ["r_0", "r_1"]
    assert [job.job.request.sampling.max_tokens for job in jobs] == [1, 2]
    assert [job.job.score_from for job in jobs] == [0, None]
    assert [job.job.request.key.tolist() for job in jobs] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": []}, "input_ids: empty"),
        ({"input_ids": [[3], []], "sampling_params": {"max_new_tokens": 1}}, "input_ids: empty"),
        ({"input_ids": "hello"}, "input_ids: input should be a valid array"),
        ({"input_ids": [3, 1.5]}, "input_ids.1: input should be a valid integer"),
        ({"input_ids": [40]}, "input_ids: ids 40 to 40; 0 to 39 are allowed"),
        ({"input_ids": [-1, 3]}, "input_ids: ids -1 to 3; 0 to 39 are allowed"),
        ({"sampling_params": {"max_new_tokens": 31}}, "2 prompt tokens [+] max_new_tokens 31 exceed .* 32 tokens"),
        ({}, "2 prompt tokens [+] max_new_tokens 128 exceed"),
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens: unknown key"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens: .* greater than or equal to 0"),
        ({"sampling_params": {"temperature": -0.1}}, "sampling_params.temperature: .* greater than or equal to 0"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature: input should be a valid number"),
        ({"sampling_params": {"temperature": float("nan")}}, "sampling_params.temperature: .* finite number"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p: input should be greater than 0"),
        ({"sampling_params": {"top_k": 20}}, "sampling_params.top_k: input should be -1"),
        ({"sampling_params": {"stop": ["x"]}}, "sampling_params.stop: .*at most 0 items"),
        ({"sampling_params": {"repetition_penalty": 1.2}}, "sampling_params.repetition_penalty: "),
        ({"sampling_params": {"stop_token_ids": [40]}}, "stop_token_ids: ids 40 to 40"),
        ({"sampling_params": {"max_new_tokens": 1, "stop_token_ids": list(range(3, 10))}}, "9 with the model's own"),
        ({"sampling_params": [{}, {}]}, "sampling_params: a list of 2 for 1 requests"),
        ({"sampling_params": {"max_new_tokens": 1}, "logprob_start_len": 2}, "logprob_start_len 2: -1 to 1 are"),
        ({"sampling_key": [1, 2**32]}, "sampling_key.1: input should be less than 4294967296"),
        ({"stream": True}, "stream: input should be False"),
        ({"lora_path": "x"}, "lora_path: input should be null"),
        ({"top_logprobs_num": 3}, "top_logprobs_num: input should be 0"),
        ({"rid": 3}, "rid: input should be a valid string"),
    ],
)
def test_what_is_not_spoken_is_refused_in_one_line(body, message):
    with pytest.raises(EngineError, match=message) as caught:
        asked(**body)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"3", b"[]", b"{", b'{"input_ids": [3', b"\xff"])
def test_what_is_no_object_is_refused(body):
    with pytest.raises(EngineError):
        parse_generate(body, MODEL, lambda: ("r", words(0, "fresh")))


def finished(**changes):
    (job,), _ = asked(sampling_params={"max_new_tokens": 8}, return_logprob=True, logprob_start_len=0)
    for name, value in {"ids": [5, 6, 1], "logprobs": [-0.5, -1.0, -2.0], "finish": "stop"}.items():
        setattr(job.job, name, value)
    for name, value in changes.items():
        setattr(job.job, name, value)
    return job


def test_a_reply_lists_log_probabilities_and_the_spans_of_versions():
    job = finished(prompt_logprobs=[-3.0], spans=[(0, 0), (1, 2), (2, 3)], cached_tokens=1)
    body = reply(job, "five six", lambda number: f"v{number}", 2)
    assert (body["text"], body["output_ids"]) == ("five six", [5, 6, 1])
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": 1}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 3, 1)
    assert meta["output_token_logprobs"] == [[-0.5, 5, None], [-1.0, 6, None], [-2.0, 1, None]]
    assert meta["input_token_logprobs"] == [[None, 3, None], [-3.0, 4, None]]
    assert meta["weight_versions"] == [
        {"version": "v0", "start": 0, "end": 2},
        {"version": "v1", "start": 2, "end": 3},
    ]
    assert meta["weight_version"] == "v2"


def test_a_reply_without_sampled_ids():
    job = finished(ids=[], logprobs=[], finish="abort")
    meta = reply(job, "", str, 4)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert (meta["weight_version"], meta["weight_versions"], meta["output_token_logprobs"]) == ("4", [], [])
    assert meta["input_token_logprobs"] == []  # aborted before it was scored
    silent = Asked(job.rid, finished(finish="length").job, return_logprob=False)
    body = reply(silent, "", str, 4)
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert "output_token_logprobs" not in body["meta_info"]
