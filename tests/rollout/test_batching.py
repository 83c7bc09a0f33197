import threading
import time

import numpy as np
import pytest

from empo2_jax.errors import EngineError
from empo2_jax.randomness import words
from empo2_jax.rollout.base import Request, Sampling
from empo2_jax.rollout.batching import Batcher, Ticket
from empo2_jax.rollout.stepwise import Job, StepEngine


class CountingEngine:
    """Samples 0, 1, 2, …; `gate` lets one burst through per release."""

    def __init__(self, slots=2, gated=True):
        self.policy_version, self.max_length, self.slots = 0, 1000, slots
        self.jobs: list[Job] = []
        self.admitted: list[list[str]] = []
        self.events: list[str] = []
        self.gate = threading.Semaphore(0) if gated else None
        self.broken = False

    @property
    def free_slots(self):
        return self.slots - len(self.jobs)

    def check(self, request):
        if len(request.prompt_ids) > 50:
            raise EngineError("too long")

    def admit(self, jobs):
        assert len(jobs) <= self.free_slots
        if jobs:
            self.admitted.append([str(job.request.prompt_ids[0]) for job in jobs])
        self.jobs += jobs

    def decode(self, burst=None):
        if self.gate:
            assert self.gate.acquire(timeout=30)
        if self.broken:
            raise RuntimeError("the device is gone")
        for job in list(self.jobs):
            most = job.request.sampling.max_tokens
            count = min(burst, most - len(job.ids))
            if not job.spans or job.spans[-1][0] != self.policy_version:
                job.spans.append((self.policy_version, len(job.ids)))
            job.ids += range(len(job.ids), len(job.ids) + count)
            job.logprobs += [-1.0] * count
            if len(job.ids) == most:
                job.finish = "length"
                self.jobs.remove(job)

    def withdraw(self, job):
        if job in self.jobs:
            self.jobs.remove(job)

    def flush(self):
        self.events.append("flush")

    def release_memory(self, parts):
        self.events.append(f"release {sorted(parts)}")

    def load(self, params, policy_version):
        self.policy_version = policy_version


def ticket(name, tokens):
    prompt = np.asarray([name], np.int32)
    return Ticket(str(name), Job(Request("", prompt, words(0, "test"), Sampling(tokens, 1.0, ()))))


@pytest.fixture
def made(request):
    """A batcher over a gated engine; ended with the test."""
    engine = CountingEngine()
    batcher = Batcher(engine, burst=4)
    yield engine, batcher
    batcher.close(0.0)
    for _ in range(100):
        engine.gate.release()
    batcher.join(10.0)
    assert not batcher.alive


def wait_until(fact):
    deadline = time.monotonic() + 20
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_engine_of_these_tests_has_the_protocol():
    assert isinstance(CountingEngine(), StepEngine)


def test_jobs_join_and_leave_between_bursts(made):
    engine, batcher = made
    first, second, third = ticket(1, 10), ticket(2, 3), ticket(3, 2)
    batcher.submit([first])
    wait_until(lambda: len(first.job.ids) == 0 and engine.jobs)
    batcher.submit([second, third])  # one of them finds a slot
    engine.gate.release()
    wait_until(lambda: len(first.job.ids) == 4 and second.job in engine.jobs)
    assert (batcher.running, batcher.waiting) == (2, 1)
    engine.gate.release()
    assert second.future.result(20).ids == [0, 1, 2]
    engine.gate.release()
    assert first.future.result(20).finish == third.future.result(20).finish == "length"
    assert engine.admitted == [["1"], ["2"], ["3"]]
    wait_until(lambda: batcher.running == 0)
    assert (batcher.counts.sampled_tokens, batcher.counts.finished["length"]) == (15, 3)


def test_all_ready_jobs_are_admitted_together_in_their_order(made):
    engine, batcher = made
    batcher.pause("in_place").result(20)
    tickets = [ticket(number, 4) for number in range(5)]
    for one in tickets:
        batcher.submit([one])
    assert batcher.waiting == 5
    batcher.resume().result(20)
    for _ in range(3):
        engine.gate.release()
    assert [one.future.result(20).ids for one in tickets] == [[0, 1, 2, 3]] * 5
    assert engine.admitted == [["0", "1"], ["2", "3"], ["4"]]


def test_an_abort_gives_back_what_there_is(made):
    engine, batcher = made
    first, second, third = ticket(1, 100), ticket(2, 4), ticket(3, 4)
    batcher.submit([first, second, third])
    engine.gate.release()
    assert second.future.result(20).finish == "length"
    batcher.abort({"1", "3", "unknown"}.__contains__)
    for _ in range(2):
        engine.gate.release()
    aborted = first.future.result(20)
    assert aborted.finish == "abort" and aborted.ids == list(range(len(aborted.ids))) and len(aborted.ids) >= 4
    assert third.future.result(20).finish in ("abort", "length")
    wait_until(lambda: batcher.running == batcher.waiting == 0)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_stops_time_and_loses_nothing(made, mode):
    engine, batcher = made
    long = ticket(1, 9)
    batcher.submit([long])
    engine.gate.release()
    wait_until(lambda: long.job.ids)
    paused = batcher.pause(mode)
    engine.gate.release()
    paused.result(20)
    known = len(long.job.ids)
    later = ticket(2, 1)
    batcher.submit([later])
    batcher.call(lambda: engine.load(None, 1)).result(20)
    assert (batcher.running, len(engine.jobs)) == ((0, 0) if mode == "retract" else (1, 1))
    assert batcher.paused and not later.future.done()
    batcher.resume().result(20)
    for _ in range(4):
        engine.gate.release()
    assert long.future.result(20).ids == list(range(9))
    assert long.job.spans == [(0, 0), (1, known)]
    assert later.future.result(20).spans == [(1, 0)]
    assert batcher.counts.retracted == (mode == "retract")


def test_an_aborting_pause_ends_all(made):
    engine, batcher = made
    tickets = [ticket(number, 100) for number in range(3)]
    batcher.submit(tickets)
    engine.gate.release()
    paused = batcher.pause("abort")
    engine.gate.release()
    paused.result(20)
    assert {one.future.result(20).finish for one in tickets} == {"abort"}


def test_a_command_that_waits_for_silence_is_not_starved(made):
    engine, batcher = made
    first, second = ticket(1, 8), ticket(2, 4)
    batcher.submit([first])
    wait_until(lambda: engine.jobs)
    loaded = batcher.call(lambda: engine.load(None, 7), when_idle=True)
    batcher.submit([second])
    for _ in range(4):
        engine.gate.release()
    loaded.result(20)
    assert first.future.result(20).spans == [(0, 0)]
    assert second.future.result(20).spans == [(7, 0)]


def test_a_flush_is_refused_while_jobs_hold_slots(made):
    engine, batcher = made
    batcher.flush().result(20)
    batcher.submit([ticket(1, 100)])
    wait_until(lambda: engine.jobs)
    refused = batcher.flush()
    engine.gate.release()
    with pytest.raises(EngineError, match="1 requests run"):
        refused.result(20)
    assert engine.events == ["flush"]


def test_what_cannot_be_queued_is_refused_whole(made):
    _, batcher = made
    batcher.pause("in_place").result(20)
    batcher.submit([ticket(1, 1)])
    with pytest.raises(EngineError, match="rid '1' is in use"):
        batcher.submit([ticket(2, 1), ticket(1, 1)])
    with pytest.raises(EngineError, match="rid '3' is in use"):
        batcher.submit([ticket(3, 1), ticket(3, 1)])
    long = ticket(4, 1)
    long.job.request = Request("", np.zeros(51, np.int32), words(0, "test"), Sampling(1, 1.0, ()))
    with pytest.raises(EngineError, match="too long"):
        batcher.submit([ticket(5, 1), long])
    assert batcher.waiting == 1


def test_memory_goes_when_no_job_is_there_and_no_job_comes_before_it_is_back():
    engine = CountingEngine(gated=False)
    batcher = Batcher(engine, burst=1)
    batcher.pause("retract").result(20)
    one = ticket(1, 2)
    batcher.submit([one])
    with pytest.raises(EngineError, match="1 requests are there"):
        batcher.release_memory(["kv_cache"]).result(20)
    batcher.resume()
    one.future.result(20)
    batcher.release_memory(["weights", "kv_cache"]).result(20)
    batcher.resume_memory(["kv_cache"]).result(20)
    assert batcher.released == ["weights"] and engine.events == ["release ['kv_cache', 'weights']"]
    with pytest.raises(EngineError, match="the memory of weights was given back"):
        batcher.submit([ticket(2, 1)])
    batcher.resume_memory(["weights"]).result(20)
    two = ticket(3, 1)
    batcher.submit([two])
    assert two.future.result(20).finish == "length"
    batcher.close(0.0)
    batcher.join(20.0)


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_closing_finishes_within_the_grace_and_aborts_the_rest(grace_s):
    batcher = Batcher(CountingEngine(gated=False), burst=1)
    batcher.pause("in_place").result(20)
    one = ticket(1, 50)
    batcher.submit([one])
    if grace_s:
        batcher.resume()
    batcher.close(grace_s)
    batcher.join(20.0)
    assert not batcher.alive
    assert one.future.result(0).finish == ("length" if grace_s else "abort")
    with pytest.raises(EngineError, match="shutting down"):
        batcher.submit([ticket(2, 1)])
    with pytest.raises(EngineError, match="has stopped"):
        batcher.call(lambda: None)


def test_a_dying_engine_fails_everybody_who_waits():
    engine = CountingEngine()
    engine.broken = True
    batcher = Batcher(engine, burst=1)
    running, waiting = [ticket(number, 5) for number in range(2)], ticket(9, 5)
    batcher.submit([*running, waiting])
    never = batcher.call(lambda: None, when_idle=True)
    engine.gate.release()
    for one in (*running, waiting):
        with pytest.raises(EngineError, match="has stopped"):
            one.future.result(20)
    batcher.join(20.0)
    assert not batcher.alive and never.done()
    assert str(batcher.failure) == "the device is gone"


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("the device is gone")])
def test_a_command_that_ends_the_thread_fails_itself_and_all_others(error):
    def load():
        raise error

    batcher = Batcher(CountingEngine(), burst=1)
    calls, held = [], threading.Event()
    batcher.call(lambda: held.wait(20))
    first, second = batcher.call(load), batcher.call(lambda: calls.append("second"))
    waiting = ticket(1, 5)
    batcher.submit([waiting])
    held.set()
    for future in (first, second, waiting.future):
        with pytest.raises(EngineError, match="has stopped"):
            future.result(20)
    batcher.join(20.0)
    assert batcher.failure is error and not batcher.alive and calls == []
