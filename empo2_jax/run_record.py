"""What a run directory says of itself: its configuration, how it was started, and who may go on in it.

Checkpoints hold the state (`checkpoint.py`); this is about the experiment that they belong to.
"""

import fcntl
import hashlib
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from empo2_jax.config import Config
from empo2_jax.config_file import dump_toml
from empo2_jax.errors import CheckpointError
from empo2_jax.metrics import write_atomically
from empo2_jax.panels import load_panel
from empo2_jax.readers import read_json
from empo2_jax.records import Facts, Fork

CONFIG_FILE, PANEL_FILE, FACTS_FILE, FORK_FILE = "config.toml", "panel.toml", "run.json", "fork.json"
MAY_DIFFER = (  # keys that a resumed run may change: they do not reach the numbers, or only by rounding (of the model)
    "run.name", "run.dir", "run.iterations", "run.tensorboard", "run.trackers", "run.mirror", "run.episodes_logged",
    "run.watchdog_s", "run.updates_kept", "reflexion.trials", "env.workers", "env.step_timeout_s", "evaluation.every",
    "checkpoint.", "warmstart.shared_dir", "model.mesh", "model.remat", "model.attention", "update.offload_moments",
    "rollout.servers", "rollout.router", "rollout.weights_dir", "rollout.api_key_env", "rollout.admin_key_env",
    "rollout.in_flight", "rollout.attempts", "rollout.canary_tolerance", "rollout.request_timeout_s",
    "rollout.control_timeout_s", "rollout.recovery_timeout_s", "rollout.release_memory",
)  # fmt: skip


class RunLock:
    """One process per directory of a run or study, as a context manager. The kernel frees it when the process dies."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ".lock"

    def __enter__(self) -> "RunLock":
        """Take the lock; raises `CheckpointError` if another process has it or the directory cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+")
        except OSError as error:
            raise CheckpointError(f"{self._path.parent}: cannot be written: {error.strerror}") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise CheckpointError(f"{self._path.parent}: another process is using this directory") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        self._file.close()


def source_commit() -> str:
    """Commit of the checkout that this package runs from, with `-dirty` where it was changed; "" outside of one."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""  # no git here
    return done.stdout.strip()


def record_config(config: Config) -> None:
    """Write `config.toml`, and beside it the panel's content, which the file names: a run directory can be moved."""
    panel = config.evaluation.panel
    if panel:
        write_atomically(config.run_dir / PANEL_FILE, Path(panel).read_text(encoding="utf-8"))
        evaluation = config.evaluation.model_copy(update={"panel": PANEL_FILE})
        config = config.model_copy(update={"evaluation": evaluation})
    write_atomically(config.run_dir / CONFIG_FILE, dump_toml(config))


def record_command(run_dir: Path, arguments: Sequence[str]) -> None:
    """Write `run.json`, the facts at the head of the report: command line, start time, versions, commit.

    `earlier_commits` names those of other code that the run was started with or continued by before.
    """
    before, commit = read_facts(run_dir), source_commit()
    earlier = [name for name in before.get("earlier_commits", "").split(", ") if name]
    if before.get("commit", commit) != commit:
        earlier.append(before["commit"] or "unknown")
    facts = {
        "command": shlex.join(arguments),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "empo2_jax": version("empo2_jax"),
        "commit": commit,
        **({"earlier_commits": ", ".join(earlier)} if earlier else {}),
        "jax": version("jax"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
    write_atomically(run_dir / FACTS_FILE, json.dumps(facts, ensure_ascii=False, indent=1) + "\n")


def read_facts(run_dir: Path) -> dict[str, str]:
    """`run.json`, {} where there is none; raises `DataError` if it is something else than texts by name."""
    path = run_dir / FACTS_FILE
    return read_json(path, Facts) if path.is_file() else {}


def read_fork(run_dir: Path) -> Fork | None:
    """`fork.json`, None for a run that was not forked; raises `DataError` if it is something else."""
    path = run_dir / FORK_FILE
    return read_json(path, Fork) if path.is_file() else None


def origin(run_dir: Path) -> str:
    """Where a forked run is from and what it changed, on one line; "" for a run that was not forked."""
    fork = read_fork(run_dir)
    if fork is None:
        return ""
    changes = [f"{key} {old} → {new}" for key, (old, new) in fork["changed"].items()]
    return f"{Path(fork['run']).name}@{fork['step']}: {'; '.join(changes) or 'no key changed'}"


def check_same_run(saved: Config, new: Config) -> None:
    """Raise `CheckpointError` naming the first three keys that differ, except those of `MAY_DIFFER`."""
    before, now = identity(saved), identity(new)
    differ = [f"{key} = {value!r}, now it is {now[key]!r}" for key, value in before.items() if now[key] != value]
    if differ:
        more = f"; and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise CheckpointError(
            f"{new.run_dir}: the run was started with {'; with '.join(differ[:3])}{more}; "
            "use another run.dir or the old values"
        )


def moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What to say where a run goes on in another place; "" if it is the same one or the checkpoint does not tell.

    Args:
        before: `mesh` and `processes` of the run that saved the checkpoint; {} if they are not known.
        now: Those of this run.
    """
    if not before or before == now:
        return ""
    old, new = (f"mesh {place['mesh']} in {place['processes']} process(es)" for place in (before, now))
    return f"the checkpoint is of {old}, this is {new}: numbers go on as they would have to rounding, not bit for bit"


def identity(config: Config) -> dict[str, Any]:
    """`section.key` to value of what reaches the numbers of a run: two runs with the same are the same experiment."""
    pairs = ((f"{name}.{key}", value) for name, section in config for key, value in section)
    flat = {key: value for key, value in pairs if not key.startswith(MAY_DIFFER)}
    if panel := config.evaluation.panel:  # what it says counts, not where it lies
        content = load_panel(Path(panel)).model_dump_json()
        flat["evaluation.panel"] = f"panel {hashlib.sha256(content.encode()).hexdigest()[:12]}"
    return flat
