"""`empo2 train --from RUN@STEP`: a new run that goes on from another one's checkpoint with some keys changed.

The fork holds everything up to the checkpoint (state with optimizer, memory, novelty, logs, warm start), so that it is
resumed like any run; `fork.json` says where it is from and which keys were changed. Nothing is trained here.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from empo2_jax.checkpoint import FOLDER, CheckpointStore
from empo2_jax.config import Config
from empo2_jax.config_file import dump_toml, load_config
from empo2_jax.errors import CheckpointError, ConfigError, DataError
from empo2_jax.metrics import EPISODES_FOLDER, EVALUATIONS_FILE, METRICS_FILE, write_atomically
from empo2_jax.readers import read_json
from empo2_jax.run_record import CONFIG_FILE, FORK_FILE, identity, read_fork

# What the state of a checkpoint is made for.
KEPT = ("model.path", "warmstart.", "lora.", "memory.embedder", "rollout.max_staleness")
_LINES = {METRICS_FILE: "metrics_lines", EVALUATIONS_FILE: "evaluation_lines"}  # of the cursor


def parse_source(text: str) -> tuple[Path, int | None]:
    """`RUN@STEP` or `RUN` (its newest good checkpoint) as folder and step."""
    folder, mark, step = text.rpartition("@")
    if not mark:
        return Path(text), None
    if not step.isdecimal() or not folder:
        raise ConfigError(f"--from {text}: RUN@STEP is allowed, for example runs/toy@20")
    return Path(folder), int(step)


def changed_keys(source: Path, config: Config) -> dict[str, list[Any]]:
    """`section.key` to [old, new] of what reaches the numbers.

    Raises:
        DataError: `source` is no run directory.
        ConfigError: a key was changed that the state of a checkpoint is made for.
    """
    if not (source / CONFIG_FILE).is_file():
        raise DataError(f"{source}: not a run directory (no {CONFIG_FILE})")
    before, now = identity(load_config(source / CONFIG_FILE)), identity(config)
    changed = {key: [before[key], now[key]] for key in before if before[key] != now[key]}
    for key, (old, new) in changed.items():
        distilled = key == "intrinsic.kind" and "rnd" in (
            old,
            new,
        )  # networks have no counts, counts no networks
        if distilled or key.startswith(KEPT):
            raise ConfigError(f"--from {source}: {key} = {old!r} there, now it is {new!r}; a fork has to keep it")
    return changed


def check_fork(source: Path, step: int | None, config: Config, resume: str = "auto") -> dict[str, Any]:
    """What `fork.json` will say, or says already: run, step, hash of the checkpoint, changed keys; nothing is written.

    Args:
        source: Run directory.
        step: Checkpoint; None for the newest good one.
        config: Of the fork.
        resume: As `trainer.run` takes it; `never` refuses a fork that is there already.

    Raises:
        CheckpointError: no such checkpoint, it does not verify, or the run directory of `config` holds something else.
        ConfigError: both directories are the same, or a key was changed that has to be kept.
    """
    target, changed = config.run_dir, changed_keys(source, config)
    if not config.algorithm.learns:
        raise ConfigError(f"--from {source}: {config.algorithm.name} trains nothing that could go on; see model.path")
    if target.resolve() == source.resolve():
        raise ConfigError(f"--from {source}: a fork needs a directory of its own; set --run.dir")
    store, made = CheckpointStore(source, keep=1), read_fork(target)
    newest = (number for number in reversed(store.steps()) if store.problem(number) is None)  # process 0 alone is here
    chosen = step if step is not None else made["step"] if made else next(newest, None)
    if chosen is None:
        raise CheckpointError(f"{source}: no good checkpoint")
    origin = {"run": str(source.resolve()), "step": chosen}
    if made and {"run": made["run"], "step": made["step"]} != origin:
        raise CheckpointError(f"{target}: a fork of {made['run']}@{made['step']}; use another run.dir")
    if made and resume == "never":
        raise CheckpointError(f"{target}: is this fork already; use --resume auto or another run.dir")
    if not made and target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target}: not empty; use another run.dir for the fork")
    return {**made} if made else {**origin, "hash": store.content_hash(chosen), "changed": changed}


def fork(source: Path, step: int | None, config: Config, resume: str = "auto") -> Path:
    """Make the run directory of `config` from a checkpoint of `source`; a fork that is there already stays as it is.

    Raises:
        Empo2Error: as `check_fork`.
    """
    target, record = config.run_dir, check_fork(source, step, config, resume)
    if (target / FORK_FILE).is_file():
        return target
    draft = target.with_name(f".{target.name}.fork")
    shutil.rmtree(draft, ignore_errors=True)
    _copy(source, record["step"], draft)
    write_atomically(draft / CONFIG_FILE, dump_toml(config))
    write_atomically(draft / FORK_FILE, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    draft.rename(target)
    return target


def _copy(source: Path, step: int, draft: Path) -> None:
    """Checkpoint, warm start, and the logs up to the checkpoint."""
    shutil.copytree(source / FOLDER / str(step), draft / FOLDER / str(step), copy_function=_link_or_copy)
    if (source / "start").is_dir():
        shutil.copytree(source / "start", draft / "start", copy_function=_link_or_copy)
    cursor = read_json(source / FOLDER / str(step) / "cursor.json", dict[str, Any], CheckpointError)
    for name, count in _LINES.items():
        lines = (source / name).read_bytes().splitlines(keepends=True) if (source / name).is_file() else []
        (draft / name).write_bytes(b"".join(lines[: cursor[count]]))
    (draft / EPISODES_FOLDER).mkdir()
    for path in (source / EPISODES_FOLDER).glob("*.jsonl"):
        if path.stem.isdecimal() and int(path.stem) <= step:
            shutil.copy2(path, draft / EPISODES_FOLDER / path.name)


def _link_or_copy(old: str, new: str) -> None:
    """Files of checkpoints are never changed in place: a link is a copy that takes no space."""
    try:
        os.link(old, new)
    except OSError:  # another file system, or one without links
        shutil.copy2(old, new)
