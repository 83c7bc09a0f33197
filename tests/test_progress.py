"""Progress: plain lines without a terminal, a live line on one."""

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from empo2_jax import progress
from empo2_jax.progress import RunProgress, Seldom, clock, summary


def test_one_plain_line_per_iteration_without_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=40)
    with RunProgress(4, done=1, console=console) as progress:
        assert progress.seconds_left() == 0.0
        progress.update(2, {"episode/score": 12.34, "episode/success_rate": 0.5, "memory/size": 7, "other": 1.0})
        progress.note("[evaluating]")
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("iteration 2/4 · score 12.3 · success 0.50 · tips 7 · 0:00:0")
    assert lines[1] == "[evaluating]" and len(lines) == 2


def test_live_line_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with RunProgress(2, console=console) as progress:
        progress.update(1, {"reward/mean": 1.5})
    assert "1/2" in console.file.getvalue() and "reward 1.50" in console.file.getvalue()


def test_summary_and_clock() -> None:
    assert summary({}) == ""
    assert clock(3725.4) == "1:02:05"


def test_a_reader_that_has_gone_silences_the_run() -> None:
    source = (
        "import sys, time\n"
        "from empo2_jax.progress import RunProgress, note\n"
        "sys.stdin.readline()\n"
        "note('one')\n"
        "with RunProgress(2) as progress:\n"
        "    progress.update(1, {})\n"
        "print('two', file=sys.stderr)\n"
        "print('done', flush=True)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", source], text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stderr.close()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.read() == "done\n"
        assert process.wait() == 0


def test_a_long_phase_tells_of_itself_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    seldom = Seldom(60.0)
    for second in (1, 59, 60, 61, 119, 125, 184, 185):
        now[0] = float(second)
        seldom.note(f"at {second}")
    assert capsys.readouterr().err == "at 60\nat 125\nat 185\n"
