"""Folders of simulators: those of a killed process go when the next one starts, those of a living one stay."""

import fcntl
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from empo2_jax.envs.scratch import Scratch, sweep

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
OWNER = """
import sys
from empo2_jax.envs.scratch import Scratch
scratch = Scratch("empo2-test-")
print(scratch.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_process_goes_and_those_of_living_ones_stay(temporary: Path) -> None:
    mine = Scratch("empo2-test-")
    (temporary / "empo2-test-bare").mkdir()  # without a lock: nobody knows whose
    (temporary / "empo2-test-file").touch()
    with subprocess.Popen([sys.executable, "-c", OWNER], **PIPES, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "table.txt").write_text("objects")
        assert sweep("empo2-test-") == [] and theirs.parent == temporary
        other.kill()
        other.wait()
        assert theirs.is_dir()
    assert sweep("other-") == []
    new = Scratch("empo2-test-")
    assert not theirs.exists() and mine.path.is_dir() and new.path.is_dir()
    for scratch in (mine, new, new):
        scratch.remove()
    assert sorted(path.name for path in temporary.iterdir()) == ["empo2-test-bare", "empo2-test-file"]


def test_a_folder_that_was_swept_before_it_was_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, swept = fcntl.flock, []

    def swept_once(file, how: int) -> None:
        if not swept:
            swept.append(Path(file.name).parent)
            shutil.rmtree(swept[0])
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", swept_once)
    scratch = Scratch("empo2-test-")
    assert scratch.path.is_dir() and [scratch.path] != swept and list(temporary.iterdir()) == [scratch.path]
    scratch.remove()
    assert list(temporary.iterdir()) == []
