"""The files of a run as the page needs them. The run may be unfinished, still writing, or of another version.

What is there is read once. A file that cannot be used as a whole is left out with a remark and never read half; only
without `metrics.jsonl`, or where a log is damaged in its middle, there is no page at all.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from safetensors import SafetensorError
from safetensors.numpy import load

from empo2_jax.checkpoint_files import MANIFEST, read_json
from empo2_jax.config import Config
from empo2_jax.config_file import load_config
from empo2_jax.errors import CheckpointError, ConfigError, DataError
from empo2_jax.metrics import (
    ADAPTATIONS_FILE,
    EPISODES_FOLDER,
    EVALUATIONS_FILE,
    Record,
    read_jsonl,
    read_metrics,
)
from empo2_jax.report.memory_content import Content, read_content
from empo2_jax.run_record import CONFIG_FILE, origin, read_facts
from empo2_jax.types import StopReason

LOSSES_FILE = "start/losses.json"  # of the warm start
CHECKPOINTS_FOLDER = "checkpoints"
TIPS_FILE, VISITS_FILE, STATES_FILE = "memory/tips.jsonl", "novelty/novelty.json", "novelty/novelty.safetensors"
Shape = Mapping[str, Any]  # the keys that a record needs; under each the shape of what is listed there, or none
STEP: Shape = {
    **dict.fromkeys(("observation", "state_before", "action", "resolved", "resolution", "intrinsic_reward")),
    **{"action_tokens": None, "tips": dict.fromkeys(("content", "score"))},
}
EPISODE: Shape = {
    **dict.fromkeys(("id", "task", "mode", "score", "success", "stop_reason", "extrinsic_return", "intrinsic_return")),
    **{"tip_written": None, "steps": STEP},
}
EVALUATION: Shape = {
    **dict.fromkeys(("label", "iteration", "split", "complete", "score", "success", "valid_actions")),
    "rows": dict.fromkeys(("task", "variation", "scores")),
}
ADAPTATION: Shape = {
    **dict.fromkeys(("label", "iteration", "split", "memory", "score", "best_score", "complete")),
    "rows": dict.fromkeys(("task",)),
}
LARGEST_STORE = 512_000_000  # bytes of states that are read to draw them


@dataclass(frozen=True)
class Kept:
    """Memory and novelty of the newest checkpoint whose files are what was written."""

    step: int
    memory: Content
    visits: dict[str, list[int]]  # by key of the novelty store, in the order of `states`
    states: Float32[np.ndarray, "N D"]  # embeddings, unit norm; none where they were too many or are not kept


@dataclass(frozen=True)
class RunFiles:
    """Everything but the episodes, which are read file by file."""

    folder: Path
    metrics: list[Record]
    evaluations: list[Record]
    adaptations: list[Record]
    losses: list[float]
    facts: dict[str, Any]
    forked: str
    config: Config | None
    config_text: str
    kept: Kept | None
    remarks: list[str]  # what was left out, for the head of the page


def read_run(folder: Path) -> RunFiles:
    """Read a run directory.

    Raises:
        DataError: no `metrics.jsonl`, or a log or `run.json` is damaged.
    """
    remarks: list[str] = []
    return RunFiles(
        folder=folder,
        metrics=read_metrics(folder),
        evaluations=_lines(folder / EVALUATIONS_FILE, EVALUATION, remarks),
        adaptations=_lines(folder / ADAPTATIONS_FILE, ADAPTATION, remarks),
        losses=_losses(folder / LOSSES_FILE),
        facts=read_facts(folder),
        forked=origin(folder),
        config=_config(folder / CONFIG_FILE, remarks),
        config_text=_text(folder / CONFIG_FILE),
        kept=_kept(folder / CHECKPOINTS_FOLDER, remarks),
        remarks=remarks,
    )


def episode_files(folder: Path) -> list[tuple[int, Path]]:
    """(iteration, file) in order."""
    found = [path for path in (folder / EPISODES_FOLDER).glob("*.jsonl") if path.stem.isdecimal()]
    return sorted((int(path.stem), path) for path in found)


def read_episodes(files: list[tuple[int, Path]], remarks: list[str]) -> Iterator[tuple[int, list[Record]]]:
    """(iteration, its recorded episodes), one file at a time.

    A file that another version wrote, or that a resumed run has removed since, gets a remark.
    """
    for iteration, path in files:
        try:
            episodes = read_jsonl(path)
            flaw = _flaw(episodes)
        except DataError:
            if path.exists():
                raise
            flaw = "it was removed while the page was made"
        if flaw:
            remarks.append(f"{EPISODES_FOLDER}/{path.name} is left out: {flaw}.")
        else:
            yield iteration, episodes


def _flaw(episodes: list[Record]) -> str:
    """Why episodes cannot be used, "" if they can."""
    if lacking := {key for record in episodes for key in _lacking(record, EPISODE)}:
        return f"it lacks {', '.join(sorted(lacking))}"
    unknown = {str(record["stop_reason"]) for record in episodes} - set(StopReason)
    return f"it has unknown stop reasons: {', '.join(sorted(unknown))}" if unknown else ""


def _lacking(record: Any, shape: Shape) -> set[str]:
    """The keys that a record and the records listed in it lack; all where it is no record."""
    if not isinstance(record, dict):
        return set(shape)
    lacking = shape.keys() - record.keys()
    for name, inner in shape.items():
        if inner and name not in lacking:
            parts = record[name] if isinstance(record[name], list) else [None]
            lacking = lacking.union(*(_lacking(part, inner) for part in parts))
    return lacking


def _lines(path: Path, shape: Shape, remarks: list[str]) -> list[Record]:
    """The lines that have what they need, with a remark on the others; [] without the file."""
    records = read_jsonl(path) if path.exists() else []
    flaws = [_lacking(record, shape) for record in records]
    if lacking := set().union(*flaws):
        count = sum(map(bool, flaws))
        remarks.append(
            f"{path.name}: {count} of {len(records)} lines are left out: they lack {', '.join(sorted(lacking))}."
        )
    return [record for record, flaw in zip(records, flaws, strict=True) if not flaw]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _losses(path: Path) -> list[float]:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, list):
        raise DataError(f"{path}: a JSON list is expected")
    return content


def _config(path: Path, remarks: list[str]) -> Config | None:
    try:
        return load_config(path) if path.exists() else None
    except ConfigError as error:
        remarks.append(f"{CONFIG_FILE} is shown but not understood, as that of another version: {error}")
        return None


def _kept(folder: Path, remarks: list[str]) -> Kept | None:
    """From the newest step that is whole; a running trainer may remove one at any moment."""
    steps = sorted((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), reverse=True)
    for step in steps:
        try:
            return _of_step(folder / str(step), step, remarks)
        except OSError as error:
            remarks.append(
                f"Checkpoint {step} is passed over: {Path(error.filename or folder).name}: {error.strerror}."
            )
        except (CheckpointError, ValueError, SafetensorError) as error:
            remarks.append(f"Checkpoint {step} is passed over: {error}.")
        except (KeyError, TypeError, AttributeError) as error:
            said = f"{type(error).__name__}: {error}"
            remarks.append(f"Checkpoint {step} is passed over, as that of another version: {said}.")
    return None


def _of_step(folder: Path, step: int, remarks: list[str]) -> Kept:
    sums = read_json(folder / MANIFEST).get("files", {})
    memory = read_content(islice(BytesIO(_checked(folder, TIPS_FILE, sums)), 1, None))  # a header comes first
    if VISITS_FILE not in sums:  # another kind of novelty, without entries
        return Kept(step, memory, {}, np.zeros((0, 0), np.float32))
    visits = json.loads(_checked(folder, VISITS_FILE, sums))
    size = (folder / STATES_FILE).stat().st_size
    if size > LARGEST_STORE:
        remarks.append(f"The novelty map is left out: its states take {size / 1e6:,.0f} MB.")
        return Kept(step, memory, visits, np.zeros((0, 0), np.float32))
    states = load(_checked(folder, STATES_FILE, sums))["embeddings"]
    if len(states) != sum(map(len, visits.values())):
        raise CheckpointError(f"{STATES_FILE}: {len(states)} states do not fit the visits in {VISITS_FILE}")
    return Kept(step, memory, visits, states)


def _checked(folder: Path, name: str, sums: dict[str, str]) -> bytes:
    """The bytes of a file that its manifest vouches for."""
    content = (folder / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != sums.get(name):
        raise CheckpointError(f"{name}: checksum does not match")
    return content
