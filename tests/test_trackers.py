"""Trackers in processes of their own: one run id, no step twice, and none that fails or hangs stops a run."""

import json
import logging
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from empo2_jax.config import parse_config
from empo2_jax.config_file import dump_toml
from empo2_jax.errors import ConfigError
from empo2_jax.metrics import MetricsLog
from empo2_jax.trackers import TrackerProcess, sinks

# What `wandb.init` and a run's `log` were asked, one JSON line each; the rest of the behavior is in the environment.
FAKE = """
import json, os, time
def note(**values):
    with open(os.environ["FAKE_WANDB"], "a") as file:
        file.write(json.dumps(values) + "\\n")
class Settings(dict):
    def __init__(self, **values):
        super().__init__(values)
class Run:
    def log(self, values, step):
        if os.environ.get("FAKE_WANDB_DOES") == f"raise at {step}":
            raise RuntimeError("the server is down")
        if os.environ.get("FAKE_WANDB_DOES") == f"hang at {step}":
            time.sleep(600)
        note(step=step, values=values)
    def finish(self):
        note(finished=True)
def init(id, resume, name, config, settings, dir):
    note(id=id, resume=resume, name=name, seed=config["run"]["seed"])
    return Run()
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "modules/wandb").mkdir(parents=True)
    (tmp_path / "modules/wandb/__init__.py").write_text(FAKE)
    root = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "modules"), root]))
    monkeypatch.setenv("FAKE_WANDB", str(tmp_path / "asked.jsonl"))
    folder = tmp_path / "my_run"
    folder.mkdir()
    (folder / "config.toml").write_text(dump_toml(parse_config({"run": {"seed": 7}})))
    return folder


def asked(run_dir: Path) -> list[dict]:
    path = run_dir.parent / "asked.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def train(run_dir: Path, first: int, last: int, keep: int | None = 0, **settings: float) -> float:
    """Write iterations as a run does; returns the seconds that training had to wait, without the end."""
    log = MetricsLog(run_dir, keep, [TrackerProcess(run_dir, "wandb", **settings)])
    began = time.monotonic()
    for iteration in range(first, last + 1):
        log.write(iteration, {"reward/mean": iteration / 2, "actor/kl": float("nan")})
    waited = time.monotonic() - began
    log.close()
    return waited


def test_a_resumed_run_keeps_its_id_and_sends_no_step_twice(run_dir: Path) -> None:
    train(run_dir, 1, 3)
    train(run_dir, 3, 5, keep=2)  # its checkpoint was that of iteration 2
    first, *rest = asked(run_dir)
    assert first == {"id": first["id"], "resume": "allow", "name": "my_run", "seed": 7}
    assert rest == [
        *({"step": step, "values": {"reward/mean": step / 2}} for step in (1, 2, 3)),
        {"finished": True},
        first,
        *({"step": step, "values": {"reward/mean": step / 2}} for step in (4, 5)),
        {"finished": True},
    ]


def test_a_tracker_that_fails_is_said_once_and_catches_up_later(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_WANDB_DOES", "raise at 2")
    with caplog.at_level(logging.WARNING):
        train(run_dir, 1, 3)
    assert [record.message for record in caplog.records] == [
        "tracker wandb ended: RuntimeError: the server is down; the run goes on, metrics.jsonl has everything; "
        "see docs/troubleshooting.md#trackers-that-stop"
    ]
    monkeypatch.delenv("FAKE_WANDB_DOES")
    train(run_dir, 4, 4, keep=3)
    assert [record["step"] for record in asked(run_dir) if "step" in record] == [1, 2, 3, 4]


def test_a_tracker_that_died_is_started_again_while_the_run_goes_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WANDB_DOES", "raise at 1")
    tracker = TrackerProcess(run_dir, "wandb", again_s=0.0)
    log = MetricsLog(run_dir, 0, [tracker])
    log.write(1, {"reward/mean": 1.0})
    assert tracker._process.wait(60) == 1
    monkeypatch.delenv("FAKE_WANDB_DOES")
    log.write(2, {"reward/mean": 2.0})
    log.close()
    assert [record["step"] for record in asked(run_dir) if "step" in record] == [1, 2]


def test_a_tracker_that_hangs_holds_up_only_the_end_and_that_not_long(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_WANDB_DOES", "hang at 1")
    assert train(run_dir, 1, 200, close_s=1.0) < 10
    assert "tracker wandb did not finish within 1 s" in caplog.text


def test_a_tracker_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r"run\.trackers: wandb is not installed; the extra `wandb`"):
        sinks(tmp_path, ("wandb",))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy about MLflow's own code
@pytest.mark.skipif(find_spec("mlflow") is None, reason="the extra `mlflow` is not installed")
def test_mlflow_itself_has_every_step_once_in_one_run(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    (tmp_path / "config.toml").write_text(dump_toml(parse_config({"run": {"seed": 7}})))
    for first, last, keep in ((1, 3, 0), (3, 5, 2)):
        log = MetricsLog(tmp_path, keep, [TrackerProcess(tmp_path, "mlflow", close_s=300.0)])
        for iteration in range(first, last + 1):
            log.write(iteration, {"reward/mean": iteration / 2})
        log.close()
    run_id = json.loads((tmp_path / "trackers/mlflow.json").read_text())["id"]
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'trackers/mlflow.db'}")
    history = client.get_metric_history(run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(step, step / 2) for step in range(1, 6)]
    run = client.get_run(run_id)
    assert (run.info.status, run.data.params["run.seed"]) == ("FINISHED", "7")
    assert len(client.search_runs([run.info.experiment_id])) == 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="the extra `wandb` is not installed")
def test_wandb_itself_writes_offline_runs_of_one_id_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "s3cret" * 7)
    (tmp_path / "config.toml").write_text(dump_toml(parse_config({"run": {"seed": 7}})))
    for first, last, keep in ((1, 2, 0), (3, 3, 2)):
        log = MetricsLog(tmp_path, keep, [TrackerProcess(tmp_path, "wandb", close_s=300.0)])
        for iteration in range(first, last + 1):
            log.write(iteration, {"reward/mean": iteration / 2})
        log.close()
    run_id = json.loads((tmp_path / "trackers/wandb.json").read_text())["id"]
    assert json.loads((tmp_path / "trackers/wandb.json").read_text())["last"] == 3
    written = list((tmp_path / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(written) == 2 and all(path.stat().st_size for path in written)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
