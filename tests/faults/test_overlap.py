"""Rollouts that run ahead, in real runs: which weights sampled what, what a kill loses, how errors and stops end."""

import shutil
import signal
from pathlib import Path

import pytest

from empo2_jax import experience
from empo2_jax.assets import toy_start
from empo2_jax.checkpoint import CheckpointStore
from empo2_jax.cli import main
from empo2_jax.errors import EnvError
from empo2_jax.metrics import read_jsonl, read_metrics, untimed
from tests.fixtures.processes import empo2, line_count, start, stop_when, train_arguments
from tests.fixtures.servers import running_server

pytestmark = pytest.mark.medium

LAST = 3


def arguments(run_dir: Path, *more: str) -> list[str]:
    options = ("--rollout.max_staleness", "1", "--run.iterations", str(LAST), "--algorithm.p_memory", "0.5")
    return train_arguments(run_dir, *options, *more)


def content_hash(run_dir: Path) -> str:
    return CheckpointStore(run_dir, keep=9).content_hash(LAST)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that is not disturbed."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    assert main(arguments(run_dir)) == 0
    return run_dir


def assert_same(run_dir: Path, reference: Path) -> None:
    assert content_hash(run_dir) == content_hash(reference)
    assert untimed(read_metrics(run_dir)) == untimed(read_metrics(reference))
    for number in range(1, LAST + 1):  # each rollout was trained on once, and as it was collected
        name = f"episodes/{number}.jsonl"
        assert (run_dir / name).read_bytes() == (reference / name).read_bytes()


def test_every_rollout_but_the_first_is_one_version_behind(reference: Path) -> None:
    records = read_metrics(reference)
    for number, record in enumerate(records, start=1):
        episodes = read_jsonl(reference / f"episodes/{number}.jsonl")
        assert {episode["id"].partition("/")[0] for episode in episodes} == {f"i{number - 1}"}
        versions = {step["policy_version"] for episode in episodes for step in episode["steps"]}
        assert versions == {max(number - 2, 0)}
        age = float(number > 1)
        assert (record["staleness/mean"], record["staleness/max"]) == (age, age)
        assert record["empo2/on/ratio"] == pytest.approx(1.0, abs=1e-6)  # the denominator is the trainer's own
        assert 0 <= record["perf/overlap"] <= 1
    assert records[0]["mismatch/logprob_abs_diff_max"] <= 1e-5 and "staleness/kl" not in records[0]
    assert "mismatch/kl" not in records[1] and records[1]["staleness/logprob_abs_diff"] > 1e-4
    for step in range(LAST + 1):
        waiting = sorted(path.name for path in (reference / f"checkpoints/{step}/rollouts").iterdir())
        assert waiting == ([f"{step}.episodes", f"{step}.json"] if 0 < step < LAST else [])


def test_going_back_to_a_checkpoint_trains_on_the_rollout_that_it_holds(reference: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(reference, run_dir)
    assert main(arguments(run_dir, "--resume", str(run_dir / "checkpoints/1"))) == 0
    assert_same(run_dir, reference)


@pytest.mark.slow
def test_killed_while_both_work_it_trains_on_nothing_twice_and_repeats_nothing(reference: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, _ = stop_when(start(*arguments(run_dir)), (run_dir / "checkpoints/1").is_dir, signal.SIGKILL)
    assert code == -signal.SIGKILL
    done = empo2(*arguments(run_dir))
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(run_dir, reference)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_ends_both_threads_in_one_line_and_the_run_goes_on(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    run_dir, rarely = tmp_path / "run", ("--checkpoint.every", "9")
    process = start(*arguments(run_dir, *rarely))
    found, errors = stop_when(process, lambda: line_count(run_dir / "metrics.jsonl") == 1, number)
    assert found == code, errors[-2000:]
    assert "Traceback" not in errors
    assert "resume with: empo2" in errors.splitlines()[-1]
    saved = max(CheckpointStore(run_dir, keep=9).steps())
    assert saved > 0  # what was complete
    done = empo2(*arguments(run_dir, *rarely))
    assert done.returncode == 0, done.stderr[-3000:]
    # The rollout that was cut off is collected again, under the weights that there are now.
    assert [record["iteration"] for record in read_metrics(run_dir)] == list(range(1, LAST + 1))
    for index in range(LAST):
        episodes = read_jsonl(run_dir / f"episodes/{index + 1}.jsonl")
        assert {episode["id"].partition("/")[0] for episode in episodes} == {f"i{index}"}
        (version,) = {step["policy_version"] for episode in episodes for step in episode["steps"]}
        assert index - version in (0, 1)


@pytest.mark.slow
def test_a_server_keeps_its_version_while_the_trainer_updates(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running_server(toy_start(), "--slots", "16") as server:
        remote = ("--rollout.engine", "sglang", "--rollout.servers", server.url)
        assert main(arguments(run_dir, *remote)) == 0
    for index, record in enumerate(read_metrics(run_dir)):
        episodes = read_jsonl(run_dir / f"episodes/{index + 1}.jsonl")
        assert {step["policy_version"] for episode in episodes for step in episode["steps"]} == {max(index - 1, 0)}
        assert record["staleness/mean"] == float(index > 0)
        assert record["engine/stale"] == 0 and record["engine/canary_abs_diff_max"] <= 1e-4


def test_what_fails_in_the_collecting_thread_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def refuse(episodes: object) -> None:
        calls.append(episodes)
        if len(calls) == 2:
            raise EnvError("4 of 16 episodes failed")

    monkeypatch.setattr(experience, "refuse_many_failures", refuse)
    assert main(arguments(tmp_path / "run")) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: 4 of 16 episodes failed"
    assert CheckpointStore(tmp_path / "run", keep=9).verify()[0] == (0, None)
