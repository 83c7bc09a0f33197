"""The files of a run as the page needs them. The run may be unfinished, still writing, or of another version.

What is there is read once. A file that cannot be used as a whole is left out with a remark and never read half; only
without `metrics.jsonl`, or where a log is damaged in its middle, there is no page at all.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float32
from pydantic import Field, with_config
from safetensors import SafetensorError
from safetensors.numpy import load
from typing_extensions import TypedDict

from empo2_jax.checkpoint_files import MANIFEST, read_object
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
from empo2_jax.readers import RECORD, parse_json, read_json, shaped
from empo2_jax.records import Adapted, Evaluated, RecordedEpisode
from empo2_jax.report.memory_content import Content, read_content
from empo2_jax.run_record import CONFIG_FILE, origin, read_facts

LOSSES_FILE = "start/losses.json"  # of the warm start
CHECKPOINTS_FOLDER = "checkpoints"
TIPS_FILE, VISITS_FILE, STATES_FILE = "memory/tips.jsonl", "novelty/novelty.json", "novelty/novelty.safetensors"


@with_config(RECORD)
class Sums(TypedDict):
    """What is read of a manifest: checksums by file."""

    files: dict[str, str]


Losses = list[Annotated[float, Field(strict=True, allow_inf_nan=False)]]
Visits = dict[str, list[Annotated[int, Field(strict=True, ge=1, le=2**53)]]]
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
    facts: dict[str, str]
    forked: str
    config: Config | None
    config_text: str
    kept: Kept | None
    remarks: list[str]  # what was left out, for the head of the page


def read_run(folder: Path) -> RunFiles:
    """Read a run directory.

    Raises:
        DataError: no `metrics.jsonl`, or a log, `run.json`, `fork.json` or the losses of the warm start are damaged.
    """
    remarks: list[str] = []
    return RunFiles(
        folder=folder,
        metrics=read_metrics(folder),
        evaluations=_lines(folder / EVALUATIONS_FILE, Evaluated, remarks),
        adaptations=_lines(folder / ADAPTATIONS_FILE, Adapted, remarks),
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

    A file that is damaged, that another version wrote, or that a resumed run has removed since, gets a remark.
    """
    for iteration, path in files:
        try:
            yield iteration, read_jsonl(path, RecordedEpisode)
        except DataError as error:
            said = str(error).removeprefix(f"{path}: ")
            remarks.append(f"{EPISODES_FOLDER}/{path.name} is left out: {said}.")


def _lines(path: Path, shape: Any, remarks: list[str]) -> list[Record]:
    """The lines that have what they need, with a remark on the others; [] without the file."""
    records = read_jsonl(path) if path.exists() else []
    kept, flaws = [], []
    for number, record in enumerate(records, 1):
        try:
            kept.append(shaped(record, shape, f"line {number}"))
        except DataError as error:
            flaws.append(str(error))
    if flaws:
        remarks.append(f"{path.name}: {len(flaws)} of {len(records)} lines are left out; {flaws[0]}.")
    return kept


def _text(path: Path) -> str:
    """For people: bytes that are no UTF-8 are marked."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _losses(path: Path) -> list[float]:
    return read_json(path, Losses) if path.exists() else []


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
        except (CheckpointError, SafetensorError) as error:
            remarks.append(f"Checkpoint {step} is passed over: {error}.")
    return None


def _of_step(folder: Path, step: int, remarks: list[str]) -> Kept:
    sums = read_object(folder / MANIFEST, Sums)["files"]
    memory = read_content(islice(BytesIO(_checked(folder, TIPS_FILE, sums)), 1, None))  # a header comes first
    if VISITS_FILE not in sums:  # another kind of novelty, without entries
        return Kept(step, memory, {}, np.zeros((0, 0), np.float32))
    visits = parse_json(_checked(folder, VISITS_FILE, sums), Visits, VISITS_FILE, CheckpointError)
    size = (folder / STATES_FILE).stat().st_size
    if size > LARGEST_STORE:
        remarks.append(f"The novelty map is left out: its states take {size / 1e6:,.0f} MB.")
        return Kept(step, memory, visits, np.zeros((0, 0), np.float32))
    states = load(_checked(folder, STATES_FILE, sums)).get("embeddings", np.zeros(0))
    if states.ndim != 2 or len(states) != sum(map(len, visits.values())):
        raise CheckpointError(f"{STATES_FILE}: {len(states)} states do not fit the visits in {VISITS_FILE}")
    return Kept(step, memory, visits, states)


def _checked(folder: Path, name: str, sums: dict[str, str]) -> bytes:
    """The bytes of a file that its manifest vouches for."""
    content = (folder / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != sums.get(name):
        raise CheckpointError(f"{name}: checksum does not match")
    return content
