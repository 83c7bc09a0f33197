"""What a run leaves to read: `metrics.jsonl`, `evaluations.jsonl`, `episodes/<iteration>.jsonl`, TensorBoard.

The two `.jsonl` logs are the record: one line per iteration, on the disk before the call returns. A checkpoint stores
how many lines it has seen; a resumed run drops the lines beyond, so no iteration appears twice. TensorBoard is
a view of the record behind `MetricSink` and is rebuilt from it. What a metric means is said where it is computed.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from empo2_jax.errors import DataError
from empo2_jax.readers import parse_json, read_bytes
from empo2_jax.records import Metrics
from empo2_jax.types import Episode, Step

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
ADAPTATIONS_FILE = "adaptations.jsonl"  # test-time adaptation sees test rewards: never among the evaluations
EPISODES_FOLDER = "episodes"
TENSORBOARD_FOLDER = "tensorboard"
TIMED_PREFIXES = ("timing_s/", "perf/")  # values that differ between two runs of one seed

Record = dict[str, Any]
Number = int | float | np.number


class Stopwatch:
    """Wall seconds of the phases of an iteration."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = self._first = time.perf_counter()

    def lap(self, name: str) -> None:
        """Book the time since the last lap under `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """All phases and their sum as `timing_s/*`."""
        total = time.perf_counter() - self._first
        return {f"timing_s/{name}": value for name, value in self.seconds.items()} | {"timing_s/iteration": total}


@runtime_checkable
class MetricSink(Protocol):
    """A second place where numbers go."""

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Show the numbers of one iteration."""
        ...

    def close(self) -> None:
        """Flush; nothing is written afterwards."""
        ...


class JsonLines:
    """An append-only file of JSON objects, one a line, each on the disk when `append` returns."""

    def __init__(self, path: Path, keep: int | None = None) -> None:
        """Open for appending with the first `keep` lines (None: all whole lines; a torn last line is dropped).

        Raises:
            DataError: fewer than `keep` whole lines are there, or the file cannot be opened.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            self._file.seek(0)
            whole = [line for line in self._file.read().splitlines(keepends=True) if line.endswith(b"\n")]
            kept = whole if keep is None else whole[:keep]
            self._file.truncate(sum(map(len, kept)))
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror}") from error
        if keep is not None and len(kept) < keep:
            self._file.close()
            raise DataError(f"{path}: {len(kept)} lines, but the checkpoint was written after line {keep}")
        self.lines = len(kept)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line; raises `DataError` when the disk is full."""
        text = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        try:
            self._file.write(text.encode("utf-8") + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written: {error.strerror}") from error
        self.lines += 1

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()


class MetricsLog:
    """`metrics.jsonl` of a run and its views."""

    def __init__(self, run_dir: Path, keep: int | None = None, sinks: Sequence[MetricSink] = ()) -> None:
        """Keep the first `keep` iterations (None: all) and show them again to the sinks."""
        self._log = JsonLines(run_dir / METRICS_FILE, keep)
        self._sinks = sinks
        for record in read_metrics(self._log.path) if sinks else ():
            self._show(record)

    @property
    def lines(self) -> int:
        """Lines on the disk; goes into the cursor of a checkpoint."""
        return self._log.lines

    def write(self, iteration: int, values: Mapping[str, Number]) -> None:
        """Append the metrics of one iteration; NaN and infinities are kept as text."""
        record = {"iteration": iteration, **values}
        self._log.append(record)
        self._show(record)

    def _show(self, record: Mapping[str, Any]) -> None:
        numbers = {
            key: float(value) for key, value in record.items() if key != "iteration" and not isinstance(value, str)
        }
        for sink in self._sinks:
            sink.write(record["iteration"], numbers)

    def close(self) -> None:
        """Close the file and the views."""
        self._log.close()
        for sink in self._sinks:
            sink.close()


class TensorBoardSink:
    """Event files under `tensorboard/`, begun anew at every start because `MetricsLog` shows the whole record again."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary import Writer  # 0.3 s of imports for those who want it

        folder = run_dir / TENSORBOARD_FOLDER
        if folder.exists():
            shutil.rmtree(folder)
        self._writer = Writer(str(folder))

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class EpisodeLog:
    """Episodes in full, for people: one file per iteration, complete or absent."""

    def __init__(
        self, run_dir: Path, decode: Callable[[Sequence[int]], str] | None = None, last: int | None = None
    ) -> None:
        """Open the log, without the files of iterations after `last`: a resumed run has not got there yet.

        `decode` turns token ids to text; with it the last prompt and answer are written out, word for word.
        """
        self._folder = run_dir / EPISODES_FOLDER
        self._decode = decode
        if last is not None:
            for path in self._folder.glob("*.jsonl"):
                if path.stem.isdecimal() and int(path.stem) > last:
                    path.unlink()

    def write(self, iteration: int, episodes: Sequence[Episode], limit: int) -> Path | None:
        """Write the first `limit` episodes to `episodes/<iteration>.jsonl` and return the path; None if limit is 0."""
        if limit == 0:
            return None
        path = self._folder / f"{iteration}.jsonl"
        lines = [json.dumps(_plain(self._record(episode)), ensure_ascii=False) for episode in episodes[:limit]]
        write_atomically(path, "".join(line + "\n" for line in lines))
        return path

    def _record(self, episode: Episode) -> Record:
        record = {
            "id": episode.id,
            "task": str(episode.task),
            "mode": episode.mode.name,
            "goal": episode.goal,
            "score": episode.score,
            "success": episode.success,
            "stop_reason": str(episode.stop_reason),
            "error": episode.error,
            "policy_version": episode.policy_version,
            "extrinsic_return": episode.extrinsic_return,
            "intrinsic_return": episode.intrinsic_return,
            "tip_written": episode.tip,
            "steps": [_step_record(step) for step in episode.steps],
        }
        if self._decode is not None and episode.steps:
            last = episode.steps[-1]
            record["transcript"] = self._decode([*last.prompt_ids.tolist(), *last.action_ids.tolist()])
        return record


def _step_record(step: Step) -> Record:
    logprobs = step.behavior_logprobs
    return {
        "observation": step.observation,
        "state_before": step.anchor,
        "tips": [
            {"content": content, "score": score} for content, score in zip(step.tips, step.tip_scores, strict=True)
        ],
        "action": step.action,
        "resolved": step.resolved,
        "resolution": step.resolution,
        "reward": step.reward,
        "intrinsic_reward": step.intrinsic_reward,
        "truncated": step.truncated,
        "logprob_mean": float(logprobs.mean()) if len(logprobs) else 0.0,
        "logprob_min": float(logprobs.min()) if len(logprobs) else 0.0,
        "action_tokens": len(step.action_ids),
        "prompt_tokens": len(step.prompt_ids),
        "bare_prompt_tokens": len(step.bare_prompt_ids),
        "cached_tokens": step.cached_tokens,
        "policy_version": step.policy_version,
        "version_spans": [list(span) for span in step.version_spans],
    }


def read_jsonl(path: Path, shape: Any = dict[str, Any]) -> list[Record]:
    """All whole lines of a JSON-lines file, each of `shape`; a torn last line is left out.

    Raises:
        DataError: the file cannot be read, or a whole line is something else; names the line.
    """
    whole = (line for line in read_bytes(path).splitlines(keepends=True) if line.endswith(b"\n"))
    return [parse_json(line, shape, f"{path}: line {number}") for number, line in enumerate(whole, 1)]


def read_metrics(path: Path) -> list[Record]:
    """Iterations of a `metrics.jsonl`, or of the run directory that holds it; each has the key `iteration`.

    Raises:
        DataError: a folder is no run directory, or of a run that is too young; or see `read_jsonl`.
    """
    file = path / METRICS_FILE if path.is_dir() else path
    if file != path and not file.exists():
        raise DataError(
            f"{path}: no {METRICS_FILE}: not a run directory, or that of a run before its first iteration; "
            "try again once that has begun"
        )
    return read_jsonl(file, Metrics)


def untimed(records: Iterable[Mapping[str, Any]]) -> list[Record]:
    """The records without times and speeds: what two runs of one seed have in common."""
    return [{key: value for key, value in record.items() if not key.startswith(TIMED_PREFIXES)} for record in records]


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file (text: UTF-8) that is there in full or not at all; raises `DataError` when it cannot be written."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error


def _plain(value: Any) -> Any:
    """JSON values only: NumPy scalars become numbers, NaN and infinities text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = value.item() if isinstance(value, np.generic) else float(value)
    return str(number) if isinstance(number, float) and not math.isfinite(number) else number
