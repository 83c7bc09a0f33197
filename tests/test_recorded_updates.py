"""Recorded updates: the same arrays back, the newest kept, skipped ones always, and clear refusals."""

from pathlib import Path

import numpy as np
import pytest

from empo2_jax.data.packing import pack
from empo2_jax.data.rows import build_rows
from empo2_jax.errors import DataError
from empo2_jax.recorded_updates import UpdateRecorder, read_updates
from empo2_jax.types import Branches, TrainBatch
from tests.fixtures.episodes import make_episode


def batches(actions: int) -> list[TrainBatch]:
    episodes = [make_episode([[5, 6]] * actions), make_episode([[7]])]
    return pack(build_rows(episodes, [1.0, -1.0], min_token_prob=0.1, mask_modes="all"), [32], 32).batches


def sums(loss: float, skipped: bool = False) -> dict[str, np.ndarray]:
    return {
        "loss": np.array(loss, np.float32),
        "skipped": np.array(skipped),
        "ratio": np.array([1, 2, 3], np.float32),
    }


def plain(batch: TrainBatch) -> list[tuple[str, bytes] | None]:
    """Comparable, with the dtypes."""
    arrays = [*batch._replace(branches=None), *(batch.branches or ())]
    return [None if array is None else (str(array.dtype), array.tobytes()) for array in arrays]


def test_branches_come_back_too(tmp_path: Path) -> None:
    (batch, *_) = batches(3)
    ids = np.arange(len(batch.token_ids) * 4, dtype=np.int32).reshape(-1, 4)
    recorder = UpdateRecorder(tmp_path, 1)
    recorder.begin(1)
    recorder.add([batch._replace(branches=Branches(ids, ids + 1))], sums(1.0))
    recorder.end()
    (found,) = read_updates(tmp_path, 1)[0].batches
    assert plain(found) == plain(batch._replace(branches=Branches(ids, ids + 1)))


def record(recorder: UpdateRecorder, iteration: int, *losses: float) -> None:
    recorder.begin(iteration)
    for loss in losses:
        recorder.add(batches(3), sums(loss, not np.isfinite(loss)))
    recorder.end()


def test_what_was_recorded_comes_back_in_order(tmp_path: Path) -> None:
    record(UpdateRecorder(tmp_path, 1), 4, *(float(number) for number in range(12)))
    found = read_updates(tmp_path, 4)
    assert [float(update.sums["loss"]) for update in found] == list(range(12))
    for update in found:
        assert len(update.batches) == len(batches(3))
        for mine, wanted in zip(update.batches, batches(3), strict=True):
            assert plain(mine) == plain(wanted)
        np.testing.assert_array_equal(update.sums["ratio"], sums(0)["ratio"])


def test_the_newest_are_kept_and_skipped_ones_always(tmp_path: Path) -> None:
    recorder = UpdateRecorder(tmp_path, 2)
    for iteration in range(8, 13):
        record(recorder, iteration, 1.0, float("nan") if iteration == 9 else 2.0)
    assert {path.name for path in (tmp_path / "updates").iterdir()} == {"9-skipped.npz", "11.npz", "12.npz"}
    assert np.isnan(read_updates(tmp_path, 9)[1].sums["loss"])
    with pytest.raises(DataError, match=r"iteration 10 were not kept, only those of \[9, 11, 12\]"):
        read_updates(tmp_path, 10)


def test_nothing_is_written_unless_asked_for_or_by_another_process(tmp_path: Path) -> None:
    record(UpdateRecorder(tmp_path, 0), 1, 1.0)
    record(UpdateRecorder(tmp_path, 2, writes=False), 1, float("inf"))
    assert not (tmp_path / "updates").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"text"])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "updates").mkdir()
    (tmp_path / "updates/3.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"updates/3\.npz: cannot be read"):
        read_updates(tmp_path, 3)


def test_objects_are_not_unpickled_and_other_fields_are_refused(tmp_path: Path) -> None:
    (tmp_path / "updates").mkdir()
    np.savez(tmp_path / "updates/3.npz", **{"0/sums/loss": np.array([{}], object)})
    with pytest.raises(DataError, match="cannot be read: Object arrays"):
        read_updates(tmp_path, 3)
    np.savez(tmp_path / "updates/4.npz", **{"0/0/token_ids": np.zeros(1), "0/sums/loss": np.zeros(1)})
    with pytest.raises(DataError, match="not a record of updates of this version"):
        read_updates(tmp_path, 4)
