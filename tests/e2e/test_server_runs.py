"""EMPO² runs on real servers, new weights every iteration: one of two dies and returns, two processes share one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

import httpx
import pytest

from empo2_jax import assets
from empo2_jax.metrics import read_metrics, untimed
from empo2_jax.rollout.sglang_replies import parse_metrics
from empo2_jax.sync.manifest import versions
from tests.fixtures.processes import COMMAND, LIMIT_S, ROOT, line_count, start, train_arguments
from tests.fixtures.remote import KEYS, START_S, VENV, sglang_servers, signal_sglang
from tests.fixtures.servers import running_server

pytestmark = pytest.mark.slow


def ask(url: str, path: str) -> str:
    headers = {"Authorization": f"Bearer {os.environ['EMPO2_API_KEY']}"}
    return httpx.get(url + path, headers=headers, timeout=60, trust_env=False).text


def sampled(url: str) -> float:
    return parse_metrics(ask(url, "/metrics")).get("sglang:generation_tokens_total", 0.0)


def wait_until(moment: Callable[[], bool], process: subprocess.Popen[str], seconds: float = LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not moment():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.02)


def train_while_one_dies(
    place: Path, urls: list[str], iterations: int, kill: Callable[[], None], revive: Callable[[], None], *more: str
) -> list[dict[str, float]]:
    """The metrics of a run during whose third rollout the second server is killed."""
    (place / "servers.txt").write_text("\n".join(urls), encoding="utf-8")
    options = ("--rollout.engine", "sglang", "--rollout.servers", str(place / "servers.txt"))
    limits = ("--rollout.recovery_timeout_s", str(START_S), "--run.iterations", str(iterations))
    process = start(*train_arguments(place / "run", *options, *limits, "--evaluation.every", "0", *more))
    try:
        wait_until(lambda: line_count(place / "run/metrics.jsonl") == 2, process)
        before = sampled(urls[1])
        wait_until(lambda: sampled(urls[1]) > before, process)
        kill()
        revive()
        _, errors = process.communicate(timeout=2 * START_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    assert "differ by" not in errors  # the alarm of the gap
    return read_metrics(place / "run")


def check(place: Path, urls: list[str], lines: list[dict[str, float]], iterations: int) -> None:
    assert [line["iteration"] for line in lines] == list(range(1, iterations + 1))
    for line in lines:
        assert 0 <= line["mismatch/logprob_abs_diff_max"] < 1e-4 and line["engine/canary_abs_diff_max"] < 1e-4
        assert line["episode/invalid"] == line["engine/given_up"] == line["engine/stale"] == 0
    total = {name: sum(line[f"engine/{name}"] for line in lines) for name in ("taken_out", "retries", "rerouted")}
    assert total["taken_out"] == 1 and total["retries"] >= 1 and total["rerouted"] >= 1, total
    ready = [line["engine/servers_ready"] for line in lines]
    assert ready[1] == ready[-1] == 2 and 1 in ready, ready
    secrets = [key.encode() for name in KEYS if (key := os.environ.get(name))]
    files = [path.read_bytes() for path in (place / "run").rglob("*") if path.is_file()]
    assert secrets and not any(secret in content for secret in secrets for content in files)
    # The published versions, and what both servers say they serve.
    assert versions(place / "run/weights") == [iterations - 2, iterations - 1, iterations]
    assert all(f'"weight_version":"{iterations}-' in ask(url, "/model_info") for url in urls)


def report(name: str, lines: list[dict[str, float]], seconds: float) -> None:
    """Figures for docs/LOG.md; shown with `pytest -s`."""
    of = lambda key: [line[key] for line in lines]  # noqa: E731
    counts = {key: sum(of(f"engine/{key}")) for key in ("taken_out", "retries", "rerouted", "reloads")}
    gap, most = fmean(of("mismatch/logprob_abs_diff")), max(of("mismatch/logprob_abs_diff_max"))
    print(f"{name}: {len(lines)} iterations in {seconds:.0f} s, gap mean {gap:.1e}, max {most:.1e}; {counts}")
    print(f"longest load {max(of('engine/load_s')):.1f} s, servers {[int(n) for n in of('engine/servers_ready')]}")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    yield KEYS


def test_two_servers_of_our_own(tmp_path: Path, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMPO2_ADMIN_KEY")  # one key for all
    iterations, options = 12, ("--slots", "16", "--max-length", "1024")
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(assets.toy_start(), *options)) for _ in range(2)]
        urls = [server.url for server in servers]

        def revive() -> None:
            servers[1].process.communicate()
            again = (*COMMAND, "serve", str(assets.toy_start()), "--port", urls[1].rsplit(":", 1)[1], *options)
            process = subprocess.Popen(again, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            stack.callback(process.communicate)
            stack.callback(process.kill)

        began = time.monotonic()
        kill = lambda: os.kill(servers[1].process.pid, signal.SIGKILL)  # noqa: E731
        rests = ("--rollout.release_memory", "true")
        lines = train_while_one_dies(tmp_path, urls, iterations, kill, revive, *rests)
        report("empo2 serve", lines, time.monotonic() - began)
        check(tmp_path, urls, lines, iterations)


@pytest.mark.skipif(not (VENV / "bin/python").is_file(), reason="no SGLang; bash launch/sglang_cpu.sh makes one")
def test_two_sglang_servers(tmp_path: Path, keys: dict[str, str]) -> None:
    iterations = 40
    with sglang_servers(tmp_path, 2, keys) as urls:
        began = time.monotonic()
        lines = train_while_one_dies(
            tmp_path, urls, iterations, lambda: signal_sglang(urls[1], signal.SIGKILL), lambda: None
        )
        report("SGLang", lines, time.monotonic() - began)
        check(tmp_path, urls, lines, iterations)


def test_two_processes_share_servers_as_one_would(
    tmp_path: Path, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EMPO2_ADMIN_KEY")
    with running_server(assets.toy_start(), "--slots", "16", "--max-length", "1024") as server:
        options = ("--rollout.engine", "sglang", "--rollout.servers", server.url, "--model.mesh", "2,1,1")
        options += ("--rollout.release_memory", "true", "--evaluation.every", "0")
        environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        for name, start_them in (
            ("one", ("--processes", "1", "--devices", "2")),
            ("two", ("--processes", "2", "--devices", "1")),
        ):
            command = [
                "bash",
                str(ROOT / "launch/local.sh"),
                *start_them,
                *train_arguments(tmp_path / name, *options)[1:],
            ]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * LIMIT_S)
            assert done.returncode == 0, done.stderr[-3000:]
    one, two = (untimed(read_metrics(tmp_path / name)) for name in ("one", "two"))
    assert [line["iteration"] for line in two] == [1, 2]
    for mine, other in zip(two, one, strict=True):
        assert mine["engine/servers_ready"] == 1 and mine["engine/canary_abs_diff_max"] < 1e-4
        for name in (name for name in other if not name.startswith("engine/") and name != "total/prompt_tokens"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    assert versions(tmp_path / "two/weights") == [0, 1, 2]
