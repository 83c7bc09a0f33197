"""The engine over rollout servers, against a fake whose answers were recorded from a real one."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from empo2_jax.rollout import sglang
from empo2_jax.rollout.base import Completion, Measured
from empo2_jax.rollout.sglang import SglangEngine
from tests.fixtures.sglang_fake import (
    RECORDED,
    ask,
    fake_engine,
    fake_request,
    hang,
    only,
    reply,
    until,
)


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
