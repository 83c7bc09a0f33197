"""Kill -9 in mid-rollout over two servers, then go on with one of them: what had ended is kept, the rest is played."""

import base64
import signal
import sys
from pathlib import Path

import pytest

from empo2_jax.assets import toy_start
from empo2_jax.metrics import read_jsonl, read_metrics
from empo2_jax.rollout.spread import from_bytes
from empo2_jax.types import Episode
from tests.fixtures.processes import LIMIT_S, SUICIDE, empo2, start, train_arguments
from tests.fixtures.servers import running_server

pytestmark = pytest.mark.slow

SERVER = ("--slots", "8", "--max-length", "1024")
IN_THE_SECOND_WAVE = ("rollout.reflect:PolicyTipWriter:write", "after", "2")  # of four; its tips are lost


def arguments(run_dir: Path, *urls: str) -> list[str]:
    file = run_dir.parent / f"{len(urls)}_servers.txt"
    file.write_text("\n".join(urls), encoding="utf-8")
    remote = ("--rollout.engine", "sglang", "--rollout.servers", str(file), "--rollout.slots", "4")
    return train_arguments(run_dir, *remote, "--evaluation.every", "0")


def test_a_rollout_that_was_killed_is_played_to_its_end_by_fewer_servers(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running_server(toy_start(), *SERVER) as one, running_server(toy_start(), *SERVER) as other:
        process = start(
            *IN_THE_SECOND_WAVE, *arguments(run_dir, one.url, other.url), program=(sys.executable, "-c", SUICIDE)
        )
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == -signal.SIGKILL, errors[-3000:]
        other.stop()
        kept: dict[str, Episode] = {}
        told = set()
        for record in read_jsonl(run_dir / "rollouts/0-0-0.jsonl"):
            ((kept[record["id"]],), _) = from_bytes(base64.b64decode(record["episode"]))
            told |= {record["id"]} if record["told"] else set()
        assert sorted(kept) == [f"i0/g{number // 4}/e{number % 4}" for number in range(8)] and len(told) == 4
        done = empo2(*arguments(run_dir, one.url))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "8 episodes of this rollout had ended before and are kept" in done.stderr.splitlines()
    played = [read_jsonl(run_dir / f"episodes/{number}.jsonl") for number in (1, 2)]
    assert [len({episode["id"] for episode in episodes}) for episodes in played] == [len(part) for part in played]
    assert [len(part) for part in played] == [16, 16]
    for episode in played[0]:
        if before := kept.get(episode["id"]):
            assert [step["action"] for step in episode["steps"]] == [step.action for step in before.steps]
            assert episode["tip_written"] == before.tip or episode["id"] not in told
    metrics = read_metrics(run_dir)
    assert [line["iteration"] for line in metrics] == [1, 2]
    assert [line["engine/servers_ready"] for line in metrics] == [1, 1]
    assert all(line["episode/invalid"] == line["engine/given_up"] == line["engine/stale"] == 0 for line in metrics)
    steps = sum(len(episode["steps"]) for part in played for episode in part)
    assert metrics[-1]["total/environment_steps"] == steps
    assert list((run_dir / "rollouts").iterdir()) == []
