"""The engine in this process step by step: jobs that come and go, as on a server, against one call of `generate`."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.rollout.jax_engine import JaxEngine
from empo2_jax.rollout.stepwise import Job, StepEngine
from tests.fixtures.small_engine import (
    SLOTS,
    ask,
    assert_logprobs,
    logits_of,
    programs,
    prompt,
    small_engine,
    small_model,
)


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture
def engine():
    """An engine with empty slots."""
    return small_engine()


def job(request, **fields):
    """The request without a session, as a server has it."""
    return Job(replace(request, session=""), **fields)


def run(engine, waiting, burst):
    """Serve jobs that join as soon as there is a slot."""
    waiting = list(waiting)
    while waiting or engine.free_slots < SLOTS:
        joining, waiting = waiting[: engine.free_slots], waiting[engine.free_slots :]
        engine.admit(joining)
        engine.decode(burst)


def assert_equal(job, completion):
    np.testing.assert_array_equal(np.asarray(job.ids, np.int32), completion.ids)
    np.testing.assert_array_equal(np.asarray(job.logprobs, np.float32), completion.logprobs)


@pytest.mark.parametrize("burst", [1, 3, None])
def test_jobs_that_come_and_go_equal_one_call_of_generate(model, engine, burst):
    assert isinstance(engine, StepEngine)
    lengths = [5, 70, 33, 18, 90, 2, 41]
    requests = [ask(f"s{n}", prompt(size, seed=n), 1 + 5 * n, draw=n) for n, size in enumerate(lengths)]
    expected = []
    for request in requests:
        engine.load(nnx.split(model)[1], 0)
        expected += engine.generate([request])
    engine.load(nnx.split(model)[1], 0)
    jobs = [job(request) for request in requests]
    run(engine, jobs, burst)
    for one, completion in zip(jobs, expected, strict=True):
        assert one.finish == "length" and one.spans == [(0, 0)]
        assert_equal(one, completion)


def test_a_job_that_leaves_its_slot_goes_on_where_it_was(model, engine):
    request = ask("a", prompt(30), 40)
    (expected,) = engine.generate([request])
    engine.flush()
    one = job(request)
    engine.admit([one])
    engine.decode(7)
    engine.withdraw(one)
    assert (len(one.ids), one.finish, engine.free_slots) == (7, None, SLOTS)
    other = job(ask("b", np.concatenate([request.prompt_ids, one.ids])))
    engine.admit([other])
    assert other.cached_tokens == 36  # what it left behind can be reused
    engine.withdraw(other)
    engine.admit([one])
    engine.decode()
    np.testing.assert_array_equal(np.asarray(one.ids), expected.ids)
    np.testing.assert_allclose(np.asarray(one.logprobs), expected.logprobs, atol=1e-5)
    assert one.cached_tokens == 0


def test_jobs_that_run_through_a_load_mix_versions_and_leave_nothing_behind(model, engine):
    one, other = job(ask("a", prompt(30), 9)), Qwen2(model.config, rngs=nnx.Rngs(1))
    engine.admit([one])
    engine.decode(4)
    engine.load(nnx.split(other)[1], 1)
    engine.decode()
    assert one.spans == [(0, 0), (1, 4)]
    (fresh,) = engine.generate([ask("b", prompt(30))])
    assert fresh.cached_tokens == 0
    assert_logprobs(other, prompt(30), fresh)


@pytest.mark.parametrize("start", [0, 1, 20, 69])
def test_prompt_scores_equal_the_training_forward(model, engine, start):
    ids = prompt(70)
    expected = np.asarray(jax.nn.log_softmax(logits_of(model, ids), axis=-1))[np.arange(69), ids[1:]]
    engine.generate([ask("a", ids[:60], 1)])
    jobs = [job(ask("b", ids, tokens, temperature=0.3), score_from=start) for tokens in (0, 2)]
    jobs.append(job(ask("c", prompt(50, seed=1))))  # not scored, in the same batch
    engine.admit(jobs)
    assert (jobs[0].finish, jobs[1].finish) == ("length", None)
    engine.decode()
    for one in jobs[:2]:
        assert one.cached_tokens <= start
        np.testing.assert_allclose(np.asarray(one.prompt_logprobs), expected[start:], atol=1e-5, rtol=0)
    assert jobs[2].prompt_logprobs is None
    assert len(jobs[1].ids) == 2


def test_new_jobs_reuse_the_prompt_of_a_running_one(model, engine):
    ids = prompt(50)
    first, second = job(ask("a", ids, 60)), job(ask("b", np.concatenate([ids, prompt(9, seed=3)]), 5))
    engine.admit([first])
    engine.decode(2)
    engine.admit([second])
    assert second.cached_tokens == 50
    engine.decode()
    for one in (first, second):
        expected = logits_of(model, one.known_ids)
        expected = np.asarray(jax.nn.log_softmax(expected, axis=-1))[len(one.request.prompt_ids) - 1 : -1]
        picked = expected[np.arange(len(one.ids)), one.ids]
        np.testing.assert_allclose(np.asarray(one.logprobs), picked, atol=1e-5, rtol=0)


def test_serving_compiles_few_shapes(model):
    engine = JaxEngine(model, slots=SLOTS, max_length=90)  # shapes that no other test has
    before, rng = programs(), np.random.default_rng(0)
    for burst in (1, 5, 16):
        requests = [ask("", prompt(rng.integers(1, 80), seed=n), int(rng.integers(0, 10)), draw=n) for n in range(12)]
        run(engine, [job(one, score_from=None if n % 2 else 0) for n, one in enumerate(requests)], burst)
    extend, decode, copy = np.subtract(programs(), before)
    assert extend <= 4 and decode == 1 and copy <= 1  # (16, 64) tokens, scored or not; one width
