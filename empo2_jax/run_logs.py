"""The logs that a run appends to, opened at what its checkpoint knows; silent in a process that is not their writer."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from empo2_jax.alarms import PERIOD
from empo2_jax.config import RunConfig
from empo2_jax.metrics import (
    EVALUATIONS_FILE,
    EpisodeLog,
    JsonLines,
    MetricSink,
    MetricsLog,
    Record,
    TensorBoardSink,
    read_metrics,
)
from empo2_jax.trackers import sinks
from empo2_jax.types import Episode


class RunLogs:
    """`metrics.jsonl` with its views (TensorBoard, trackers), `evaluations.jsonl` and `episodes/`.

    `newest` has the last lines of `metrics.jsonl`, those of earlier processes too; none where nothing is written.
    """

    def __init__(
        self,
        run_dir: Path,
        cursor: Mapping[str, Any],
        config: RunConfig,
        *,
        writes: bool,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """Open the files and cut them to the cursor of the checkpoint, {} at the start.

        Args:
            run_dir: The run.
            cursor: `metrics_lines`, `evaluation_lines` and `iteration`, as `cursor` gave them.
            config: Which views are wanted.
            writes: Whether this process is the writer.
            decode: Text of token ids, for the episodes.

        Raises:
            DataError: a file cannot be written or read, or lacks lines that the checkpoint has seen.
            ConfigError: a tracker is not installed.
        """
        self._files: tuple[MetricsLog, JsonLines, EpisodeLog] | None = None
        self.newest: deque[Record] = deque(maxlen=PERIOD)
        if writes:
            views: list[MetricSink] = [TensorBoardSink(run_dir)] if config.tensorboard else []
            views += sinks(run_dir, config.trackers)
            metrics = MetricsLog(run_dir, cursor.get("metrics_lines", 0), views)
            evaluations = JsonLines(run_dir / EVALUATIONS_FILE, cursor.get("evaluation_lines", 0))
            self._files = metrics, evaluations, EpisodeLog(run_dir, decode, cursor.get("iteration", 0))
            self.newest.extend(read_metrics(run_dir))

    def iteration(self, number: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of an iteration."""
        if self._files:
            self._files[0].write(number, metrics)
            self.newest.append({"iteration": number, **metrics})

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Append an evaluation."""
        if self._files:
            self._files[1].append(record)

    def episodes(self, number: int, episodes: Sequence[Episode], limit: int) -> None:
        """Write the first `limit` episodes of an iteration."""
        if self._files:
            self._files[2].write(number, episodes, limit)

    def cursor(self) -> dict[str, int]:
        """Lines so far, for the checkpoint."""
        lines = (self._files[0].lines, self._files[1].lines) if self._files else (0, 0)
        return dict(zip(("metrics_lines", "evaluation_lines"), lines, strict=True))

    def close(self) -> None:
        """Close the files."""
        if self._files:
            self._files[0].close()
            self._files[1].close()
