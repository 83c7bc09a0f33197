import numpy as np
import pytest

from empo2_jax.randomness import words
from empo2_jax.rollout.base import Request, Sampling
from empo2_jax.rollout.replay import ReplayEngine


@pytest.mark.parametrize(
    ("max_tokens", "stop_ids", "expected", "stopped"),
    [
        (9, (), [4, 5, 6, 5], False),
        (9, (5,), [4, 5], True),
        (9, (6, 7), [4, 5, 6], True),
        (2, (6,), [4, 5], False),
    ],
)
def test_the_script_is_cut_like_a_sampled_sequence(max_tokens, stop_ids, expected, stopped):
    engine = ReplayEngine(lambda request: [4, 5, 6, 5], logprob=-0.25)
    prompt = np.asarray([1, 2, 3], np.int32)
    completion = engine.generate([Request("a", prompt, words(0, "t"), Sampling(max_tokens, 1.0, stop_ids))])[0]
    assert completion.ids.tolist() == expected
    assert completion.logprobs.tolist() == [-0.25] * len(expected)
    assert completion.stopped is stopped


def test_the_script_sees_the_request():
    engine = ReplayEngine(lambda request: request.prompt_ids[::-1].tolist())
    requests = [
        Request(name, np.asarray(ids, np.int32), words(0, name), Sampling(5, 1.0, ()))
        for name, ids in (("a", [1, 2]), ("b", [7, 8, 9]))
    ]
    assert [completion.ids.tolist() for completion in engine.generate(requests)] == [[2, 1], [9, 8, 7]]
