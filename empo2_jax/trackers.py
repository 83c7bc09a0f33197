"""Trackers: W&B and MLflow as views of `metrics.jsonl`, each fed by a process of its own.

A tracker may be slow, hang, raise anything or crash in native code; none of that reaches training, which only pokes the
process after every iteration. It reads the record itself and sends what its tracker has not had: `trackers/<name>.json`
holds the tracker's run id and the last iteration, written before that is sent. So a run that was killed and goes on
stays one run there, and no step is sent twice. A process that died is started again after a while, and catches up.

Addresses and keys are the trackers' own environment variables (WANDB_MODE, WANDB_API_KEY, MLFLOW_TRACKING_URI, …): none
is read or written here. TensorBoard needs no process (`metrics.py`).
"""

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from empo2_jax.errors import GUIDE, ConfigError
from empo2_jax.metrics import METRICS_FILE, MetricSink, read_metrics, write_atomically

FOLDER = "trackers"
PROJECT = "empo2_jax"
AGAIN_S = 60.0  # before a tracker that failed is started again
CLOSE_S = 60.0  # for the rest to be sent when a run ends

_log = logging.getLogger(__name__)


class WandbTracker:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it in the run directory for `wandb sync`."""

    def __init__(self, run_dir: Path, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin or continue the run `run_id`; "" makes a new one. Nothing about the machine is collected."""
        import wandb

        self.run_id = run_id or uuid.uuid4().hex
        os.environ.setdefault("WANDB_PROJECT", PROJECT)
        self._run = wandb.init(
            id=self.run_id,
            name=run_dir.resolve().name,
            dir=str(run_dir),
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(
                silent=True,
                disable_git=True,
                disable_code=True,
                console="off",
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """One step."""
        self._run.log(dict(values), step=iteration)

    def close(self) -> None:
        """Send the rest."""
        self._run.finish()


class MlflowTracker:
    """A run of MLflow; without MLFLOW_TRACKING_URI in `trackers/mlflow.db` of the run directory."""

    def __init__(self, run_dir: Path, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin or continue the run `run_id`; "" makes a new one, with the configuration as its parameters."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        default = f"sqlite:///{(run_dir / FOLDER / 'mlflow.db').resolve()}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", default))
        self.run_id = run_id
        if not run_id:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self._client.create_experiment(name)
            self.run_id = self._client.create_run(experiment, run_name=run_dir.resolve().name).info.run_id
            flat = {f"{part}.{key}": value for part, keys in config.items() for key, value in keys.items()}
            self._client.log_batch(self.run_id, params=[Param(key, str(value)[:500]) for key, value in flat.items()])
        self._client.set_terminated(self.run_id, "RUNNING")

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """One step, in one transaction."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self.run_id, metrics=[Metric(key, value, now, iteration) for key, value in values.items()]
        )

    def close(self) -> None:
        """Say that the run is over; one that goes on says so again."""
        self._client.set_terminated(self.run_id, "FINISHED")


TRACKERS = {"wandb": WandbTracker, "mlflow": MlflowTracker}


class TrackerProcess:
    """The process of one tracker, as a `MetricSink` of the run."""

    def __init__(self, run_dir: Path, name: str, again_s: float = AGAIN_S, close_s: float = CLOSE_S) -> None:
        """Start it; `again_s` is the least time between two starts, `close_s` how long the end of a run waits."""
        self._run_dir, self._name, self._again_s, self._close_s = run_dir, name, again_s, close_s
        self._log_path = run_dir / FOLDER / f"{name}.log"
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._told = False
        self._start()

    def _start(self) -> None:
        with self._log_path.open("wb") as log:
            # A session of its own: Ctrl-C is for the run, which then closes our end of the pipe, as does its death.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "empo2_jax.trackers", str(self._run_dir), self._name],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self._started = time.monotonic()

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Say that there is more to send; never waits. One warning when the process has died."""
        if self._process.poll() is not None:
            self._tell(f"ended: {self._last_words()}")
            if time.monotonic() - self._started > self._again_s:
                self._stdin.close()
                self._start()
        try:
            os.write(self._stdin.fileno(), b"\n")
        except (BrokenPipeError, BlockingIOError):
            return  # it is dead, which the next call says, or so far behind that it knows of more

    def close(self) -> None:
        """Let it send the rest, within the limit."""
        self._stdin.close()
        try:
            if self._process.wait(self._close_s):
                self._tell(f"ended: {self._last_words()}")
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._tell(f"did not finish within {self._close_s:g} s")

    def _tell(self, what: str) -> None:
        if not self._told:
            goes_on = "tracker %s %s; the run goes on, %s has everything; %strackers-that-stop"
            _log.warning(goes_on, self._name, what, METRICS_FILE, GUIDE)
        self._told = True

    def _last_words(self) -> str:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "no reason given")


def sinks(run_dir: Path, names: tuple[str, ...]) -> list[MetricSink]:
    """The processes of the trackers that a configuration names.

    Raises:
        ConfigError: one is not installed.
    """
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"run.trackers: {name} is not installed; the extra `{name}` of this package brings it")
    return [TrackerProcess(run_dir, name) for name in names]


def follow(run_dir: Path, name: str) -> None:
    """Send what is new whenever a line comes in on standard input; at its end, the rest, and close."""
    with (run_dir / FOLDER / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of a run that was killed, one may still be sending
        _send(run_dir, name)


def _send(run_dir: Path, name: str) -> None:
    state_path = run_dir / FOLDER / f"{name}.json"
    state: dict[str, Any] = {"id": "", "last": 0}
    if state_path.is_file():
        state = json.loads(state_path.read_text(encoding="utf-8"))
    tracker = TRACKERS[name](run_dir, state["id"], tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8")))
    last: int = state["last"]

    def note(iteration: int) -> None:
        write_atomically(state_path, json.dumps({"id": tracker.run_id, "last": iteration}) + "\n")

    note(last)
    more = True
    while more:
        more = bool(os.read(0, 65536))
        for record in read_metrics(run_dir / METRICS_FILE):
            if record["iteration"] <= last:
                continue
            note(record["iteration"])
            sent = False
            try:
                tracker.write(record["iteration"], numbers(record))
                sent, last = True, record["iteration"]
            finally:
                if not sent:
                    note(last)  # it said that it failed: the next process tries again
    tracker.close()


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a record that are finite numbers."""
    return {key: float(value) for key, value in record.items() if key != "iteration" and isinstance(value, int | float)}


if __name__ == "__main__":
    follow(Path(sys.argv[1]), sys.argv[2])
