"""Which steps stay, and manifests that are anything at all: named, never a crash."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from empo2_jax.checkpoint_files import check_writable, files_problem, format_problem, kept_steps, write_manifest
from empo2_jax.errors import CheckpointError
from tests.fixtures.fuzz import JSON


@pytest.mark.parametrize(
    ("last", "every", "best", "kept"),
    [
        (1, 0, 0, {9}),
        (2, 0, 0, {7, 9}),
        (9, 0, 0, {0, 2, 3, 5, 7, 9}),
        (1, 3, 0, {0, 3, 9}),
        (1, 0, 1, {5, 9}),
        (1, 0, 2, {3, 5, 9}),
        (1, 0, 9, {2, 3, 5, 9}),
        (1, 5, 1, {0, 5, 9}),
    ],
)
def test_kept_steps(last: int, every: int, best: int, kept: set[int]) -> None:
    scores = {2: 50.0, 3: 50.0, 5: 80.0, 8: 100.0}  # 8 is long gone
    assert kept_steps([0, 2, 3, 5, 7, 9], scores, last, every, best) == kept


@given(st.lists(st.integers(0, 50), unique=True, min_size=1), st.dictionaries(st.integers(0, 50), st.floats(0, 100)))
def test_the_newest_always_stays_and_nothing_is_invented(steps: list[int], scores: dict[int, float]) -> None:
    kept = kept_steps(sorted(steps), scores, 2, 7, 3)
    assert set(sorted(steps)[-2:]) <= kept <= set(steps)
    assert len(kept) <= 2 + 3 + sum(step % 7 == 0 for step in steps)


@given(JSON)
def test_a_manifest_of_any_json_is_named(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = tmp_path_factory.mktemp("step")
    (folder / "manifest.json").write_text(json.dumps(value), encoding="utf-8")
    assert files_problem(folder)


@given(st.data())
def test_one_changed_byte_anywhere_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("step")
    (folder / "memory").mkdir()
    (folder / "memory/tips.json").write_bytes(b"a tip")
    write_manifest(folder, {"step": 3})
    assert files_problem(folder) is None and format_problem(folder) is None
    path = folder / data.draw(st.sampled_from(["manifest.json", "memory/tips.json"]))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        same = json.loads(bytes(content)) == json.loads(path.read_bytes())  # white space of the manifest
    except ValueError:
        same = False
    path.write_bytes(content)
    assert same or files_problem(folder)


@pytest.mark.parametrize("place", ["file", "file/run/deep", "dangling", "/proc/run"])
def test_a_folder_that_cannot_be_written_is_refused_by_its_name(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=f"^{tmp_path / place}: cannot be written: "):
        check_writable(tmp_path / place)


def test_a_folder_that_can_be_written_is_not_made(tmp_path: Path) -> None:
    check_writable(tmp_path)
    check_writable(tmp_path / "a/b")
    assert list(tmp_path.iterdir()) == []
