"""Logs: what is written can be read, a resumed log has no line twice."""

import json
from pathlib import Path

import numpy as np
import pytest

from empo2_jax.errors import DataError
from empo2_jax.metrics import EpisodeLog, JsonLines, MetricsLog, TensorBoardSink, read_jsonl, read_metrics, untimed
from empo2_jax.types import Episode, Mode, Step, StopReason, Task


class ListSink:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, iteration: int, values: dict[str, float]) -> None:
        self.seen.append((iteration, dict(values)))

    def close(self) -> None:
        self.closed = True


def make_episode(text: str = "a lamp", number: int = 0) -> Episode:
    ids = np.arange(4, dtype=np.int32)
    step = Step(
        observation=text,
        prompt_ids=ids,
        bare_prompt_ids=ids[:3],
        action_ids=np.array([5, 6], np.int32),
        behavior_logprobs=np.array([-0.5, -1.5], np.float32),
        action="push lamp",
        resolved="push the lamp",
        resolution="similar",
        reward=2.5,
        state=text,
        tips=("the lamp is red",),
        tip_scores=(70.0,),
        intrinsic_reward=0.25,
    )
    task = Task("toy", "lamp", 3)
    return Episode(
        f"i1/g0/e{number}", task, "find it", Mode.OFF_POLICY, (step,), StopReason.DONE, 50.0, True, 1, tip="look"
    )


def test_resume_drops_later_and_torn_lines(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for iteration in range(4):
        log.write(iteration, {"reward/mean": iteration / 4})
    assert log.lines == 4
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "rew')
    assert len(read_metrics(tmp_path)) == 4

    sink = ListSink()
    resumed = MetricsLog(tmp_path, keep=2, sinks=[sink])
    resumed.write(2, {"reward/mean": 9.0})
    resumed.close()

    assert [(line["iteration"], line["reward/mean"]) for line in read_metrics(tmp_path)] == [(0, 0), (1, 0.25), (2, 9)]
    assert sink.seen == [(0, {"reward/mean": 0.0}), (1, {"reward/mean": 0.25}), (2, {"reward/mean": 9.0})]
    assert sink.closed


def test_a_torn_line_alone_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    path.write_text('{"a":1}\n{"a":')
    log = JsonLines(path)
    log.append({"a": 2})
    log.close()
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}]


def test_a_log_shorter_than_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    MetricsLog(tmp_path).close()
    with pytest.raises(DataError, match="0 lines, but the checkpoint was written after line 3"):
        MetricsLog(tmp_path, keep=3)


def test_numpy_and_infinite_values_are_valid_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write(0, {"a": np.float32(0.5), "b": float("nan"), "c": np.int64(3), "d": float("-inf")})
    log.close()
    assert read_metrics(tmp_path) == [{"iteration": 0, "a": 0.5, "b": "nan", "c": 3, "d": "-inf"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no metrics.jsonl: not a run directory, or that of a run before its first iteration; try again once"),
        ('{"iteration":0}\nnonsense\n', "line 2: not JSON"),
        ("{}\n", "no integer `iteration`"),
    ],
)
def test_unreadable_metrics_are_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        read_metrics(tmp_path)


def test_untimed_leaves_what_a_seed_decides() -> None:
    records = [{"iteration": 1, "timing_s/update": 2.0, "perf/tokens_per_s": 9.0, "reward/mean": 1.0}]
    assert untimed(records) == [{"iteration": 1, "reward/mean": 1.0}]


def test_tensorboard_files_hold_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for keep in (None, 1):
        log = MetricsLog(tmp_path, keep=keep, sinks=[TensorBoardSink(tmp_path)])
        for iteration in range(log.lines, 3):
            log.write(iteration, {"reward/mean": iteration * 0.5})
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tensors = events.Tensors("reward/mean")
    assert [(event.step, event.tensor_proto.float_val[0]) for event in tensors] == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_episodes_are_readable_and_limited(tmp_path: Path) -> None:
    log = EpisodeLog(tmp_path, decode=lambda ids: " ".join(map(str, ids)))
    path = log.write(7, [make_episode(number=number) for number in range(3)], limit=2)
    assert path == tmp_path / "episodes" / "7.jsonl"
    first, second = read_jsonl(path)
    assert (first["id"], second["id"]) == ("i1/g0/e0", "i1/g0/e1")
    assert (first["task"], first["mode"], first["stop_reason"]) == ("toy/lamp/3", "OFF_POLICY", "done")
    assert first["transcript"] == "0 1 2 3 5 6"
    assert first["steps"][0] == {
        "observation": "a lamp",
        "state_before": "",
        "tips": [{"content": "the lamp is red", "score": 70.0}],
        "action": "push lamp",
        "resolved": "push the lamp",
        "resolution": "similar",
        "reward": 2.5,
        "intrinsic_reward": 0.25,
        "truncated": False,
        "logprob_mean": -1.0,
        "logprob_min": -1.5,
        "action_tokens": 2,
        "prompt_tokens": 4,
        "bare_prompt_tokens": 3,
        "cached_tokens": 0,
        "policy_version": 0,
        "version_spans": [],
    }
    assert log.write(8, [make_episode()], limit=0) is None
    assert json.dumps(first)
