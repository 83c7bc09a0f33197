"""A gang of small shell commands: restarts within the budget, the first cause, signals, and nobody else's processes."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.fixtures.processes import ROOT

SUPERVISE = [sys.executable, str(ROOT / "launch/supervise.py")]
NAP = "for _ in $(seq 300); do sleep 0.1; done"  # ends with its shell


def command(logs: Path, script: str, *options: str) -> list[str]:
    return [*SUPERVISE, "--logs", str(logs), "--pause", "0", *options, "--", "bash", "-c", script]


def supervise(logs: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(logs, script, *options), capture_output=True, text=True, timeout=60, check=False)


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.removeprefix("supervise: ") for line in done.stderr.splitlines() if line.startswith("supervise: ")]


def test_a_killed_process_ends_the_others_and_all_start_again(tmp_path: Path) -> None:
    script = (
        f'echo "$EMPO2_PROCESS_ID/$EMPO2_NUM_PROCESSES at $EMPO2_COORDINATOR"\n[[ -e {tmp_path}/again ]] && exit 0\n'
        f"if [[ $EMPO2_PROCESS_ID == 1 ]]; then touch {tmp_path}/again; kill -9 $$; fi\n{NAP}"
    )
    done = supervise(tmp_path / "logs", script, "--processes", "3")
    assert done.returncode == 0
    assert said(done) == [
        "attempt 1: first cause: process 1: killed by SIGKILL: "
        + first_line(tmp_path / "logs/attempt_1/process_1.log"),
        "starting again (3 left)",
    ]
    ports = {first_line(path).partition(" at ")[2] for path in (tmp_path / "logs").rglob("*.log")}
    assert len(ports) == 2, "every attempt has a port of its own"
    assert first_line(tmp_path / "logs/attempt_2/process_2.log").startswith("2/3 at 127.0.0.1:")


def first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0]


def test_the_budget_ends_and_the_error_is_repeated(tmp_path: Path) -> None:
    done = supervise(tmp_path, "echo 'error: no engine'; echo more; exit 75", "--retries", "1")
    assert done.returncode == 75
    assert said(done)[0] == "attempt 1: first cause: process 0: exit code 75: error: no engine"
    assert said(done)[-1] == f"given up after 2 attempts; logs: {tmp_path}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt_1", "attempt_2"]


def test_an_abort_of_jax_is_repeated_with_the_process_that_is_gone(tmp_path: Path) -> None:
    script = "echo 'F1 client.h] Terminating. absl::Status: UNAVAILABLE: unhealthy:'; echo 1; echo stack; kill -ABRT $$"
    done = supervise(tmp_path, script, "--retries", "0")
    assert done.returncode == 134
    assert said(done)[0] == "attempt 1: first cause: process 0: killed by SIGABRT: UNAVAILABLE: unhealthy: 1"


def test_a_mistake_of_the_user_is_not_tried_again(tmp_path: Path) -> None:
    script = "[[ $EMPO2_PROCESS_ID == 0 ]] && { echo 'error: unknown key'; exit 2; }; sleep 0.3; exit 75"
    done = supervise(tmp_path, script, "--processes", "2")
    assert done.returncode == 2
    assert said(done) == ["attempt 1: first cause: process 0: exit code 2: error: unknown key"]


def test_sigterm_reaches_all_and_nothing_starts_again(tmp_path: Path) -> None:
    script = f"trap 'echo saved; exit 143' TERM; touch {tmp_path}/up_$EMPO2_PROCESS_ID\n{NAP}"
    process = subprocess.Popen(command(tmp_path / "logs", script, "--processes", "2"))
    wait_for(tmp_path / "up_0", tmp_path / "up_1")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    for number in (0, 1):
        assert (tmp_path / f"logs/attempt_1/process_{number}.log").read_text() == "saved\n"
    assert not (tmp_path / "logs/attempt_2").exists()


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_who_ignores_sigterm_is_killed_after_the_grace_and_strangers_live(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["bash", "-c", NAP])
    script = (
        f"trap '' TERM; [[ $EMPO2_PROCESS_ID == 0 ]] && exit 1; echo $$ >{tmp_path}/pid; while :; do sleep 0.1; done"
    )
    try:
        done = supervise(tmp_path / "logs", script, "--processes", "2", "--retries", "0", "--grace", "0.5")
        assert done.returncode == 1
        assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_without_a_command_or_with_a_wrong_number_it_says_so(tmp_path: Path) -> None:
    for arguments, text in (
        ([], "no command"),
        (["--processes", "0", "--", "true"], "0: 1 to 256 is allowed"),
    ):
        done = subprocess.run([*SUPERVISE, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert text in done.stderr


def test_dry_run_starts_nothing(tmp_path: Path) -> None:
    done = supervise(tmp_path / "logs", f"touch {tmp_path}/ran", "--processes", "2", "--devices", "3", "--dry-run")
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert "EMPO2_PROCESS_ID=0" in first and "EMPO2_PROCESS_ID=1" in second
    assert "--xla_force_host_platform_device_count=3" in first
    assert not list(tmp_path.iterdir())
