"""Reading a run that is unfinished, still writing, damaged or of another version."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from empo2_jax.errors import DataError
from empo2_jax.report import run_files
from empo2_jax.report.run_files import episode_files, read_episodes, read_run
from tests.fixtures.recorded import episode, make_run, step, tip, write_checkpoint, write_episodes


def test_the_newest_checkpoint_gives_memory_and_novelty(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_checkpoint(run, 9, [tip("old", 1.0)], {"a": [4]})
    write_checkpoint(run, 10, [tip("new", 2.0), tip("newer", 3.0)], {"a": [4, 1], "b": [2]})
    (run / "checkpoints/.tmp-11").mkdir()
    found = read_run(run)
    assert found.kept is not None and not found.remarks
    assert (found.kept.step, [line["content"] for line in found.kept.memory.best]) == (10, ["newer", "new"])
    assert found.kept.visits == {"a": [4, 1], "b": [2]}
    np.testing.assert_array_equal(found.kept.states, np.eye(3, 5))


def test_another_kind_of_novelty_keeps_no_states(tmp_path: Path) -> None:
    write_checkpoint(make_run(tmp_path), 2, [tip("new", 2.0)])
    kept = read_run(tmp_path).kept
    assert kept is not None and kept.memory.entries == 1 and kept.visits == {} and not len(kept.states)


@pytest.mark.parametrize(
    ("damage", "remark"),
    [
        (lambda step: (step / "memory/tips.jsonl").write_text("{}\n"), "memory/tips.jsonl: checksum does not match"),
        (lambda step: (step / "memory/tips.jsonl").unlink(), "tips.jsonl: No such file or directory"),
        (lambda step: (step / "manifest.json").unlink(), "manifest.json: No such file or directory"),
        (lambda step: (step / "manifest.json").write_text("{"), "manifest.json: not JSON"),
        (lambda step: (step / "novelty/novelty.json").write_text('{"a": [1]}'), "novelty.json: checksum does not"),
    ],
)
def test_a_damaged_or_vanished_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path, damage, remark) -> None:
    run = make_run(tmp_path)
    write_checkpoint(run, 1, [tip("old", 1.0)], {"a": [4]})
    damage(write_checkpoint(run, 2, [tip("new", 2.0)], {"a": [4, 1]}))
    found = read_run(run)
    assert found.kept is not None and found.kept.step == 1
    (text,) = found.remarks
    assert text.startswith("Checkpoint 2 is passed over: ") and remark in text


def test_a_store_too_large_to_draw_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "LARGEST_STORE", 10)
    write_checkpoint(make_run(tmp_path), 2, [tip("new", 2.0)], {"a": [4, 1]})
    found = read_run(tmp_path)
    assert found.kept is not None and found.kept.visits and not len(found.kept.states)
    assert "The novelty map is left out: its states take" in found.remarks[0]


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, iterations=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "episode/sc')
    assert [line["iteration"] for line in read_run(run).metrics] == [1, 2, 3]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl: line 4: not JSON"):
        read_run(run)


def test_a_configuration_of_another_version_is_shown_and_not_used(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "config.toml").write_text("[run]\nwarp_speed = 9\n")
    found = read_run(run)
    assert found.config is None and "warp_speed" in found.config_text
    assert found.remarks[0].startswith("config.toml is shown but not understood")


def test_files_are_read_in_the_order_of_iterations_and_old_ones_are_left_out(tmp_path: Path) -> None:
    old = {key: value for key, value in episode().items() if key != "tip_written"}
    stepped = episode(steps=[{key: value for key, value in step().items() if key != "state_before"}])
    write_episodes(tmp_path, {10: [episode("a"), episode("b")], 9: [episode("c")], 2: [old], 3: [stepped]})
    (tmp_path / "episodes/notes.jsonl").write_text("not ours\n")
    remarks: list[str] = []
    read = [(iteration, [e["id"] for e in many]) for iteration, many in read_episodes(episode_files(tmp_path), remarks)]
    assert read == [(9, ["c"]), (10, ["a", "b"])]
    assert remarks == [
        "episodes/2.jsonl is left out: line 1: tip_written is missing.",
        "episodes/3.jsonl is left out: line 1: steps[0].state_before is missing.",
    ]


def test_a_file_that_a_resumed_run_removes_meanwhile_is_left_out(tmp_path: Path) -> None:
    write_episodes(tmp_path, {1: [episode("a")], 2: [episode("b")]})
    remarks: list[str] = []
    reading = read_episodes(episode_files(tmp_path), remarks)
    assert next(reading)[0] == 1
    (tmp_path / "episodes/2.jsonl").unlink()
    assert list(reading) == []
    assert remarks == ["episodes/2.jsonl is left out: cannot be read: No such file or directory."]


def test_states_without_embeddings_pass_a_checkpoint_over(tmp_path: Path) -> None:
    place = write_checkpoint(make_run(tmp_path), 2, [tip("new", 2.0)], {"a": [4, 1]})
    states = save({"vectors": np.eye(2, dtype=np.float32)})
    (place / "novelty/novelty.safetensors").write_bytes(states)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"]["novelty/novelty.safetensors"] = hashlib.sha256(states).hexdigest()
    (place / "manifest.json").write_text(json.dumps(manifest))
    found = read_run(tmp_path)
    assert found.kept is None
    said = "novelty/novelty.safetensors: 0 states do not fit the visits in novelty/novelty.json."
    assert found.remarks == [f"Checkpoint 2 is passed over: {said}"]
