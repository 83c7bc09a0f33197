"""The batches of an iteration's updates as files, `updates/<iteration>.npz`, so that `empo2 debug` can run them again.

Written for the newest iterations if the configuration asks for it, and always for one with an update that was skipped
because it was not finite: `updates/<iteration>-skipped.npz` is never removed. Arrays only, nothing is unpickled.
"""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from empo2_jax.errors import DataError
from empo2_jax.metrics import write_atomically
from empo2_jax.types import Branches, TrainBatch

FOLDER = "updates"


class RecordedUpdate(NamedTuple):
    """One optimizer step: what went in and the sums that came out."""

    batches: list[TrainBatch]
    sums: dict[str, np.ndarray]


class UpdateRecorder:
    """Collects the updates of the iteration that runs."""

    def __init__(self, run_dir: Path, keep: int, *, writes: bool = True) -> None:
        """Keep the newest `keep` iterations; a process that is not the writer collects nothing."""
        self._folder, self._keep, self._writes = run_dir / FOLDER, keep, writes
        self._iteration, self._updates = 0, list[RecordedUpdate]()

    def begin(self, iteration: int) -> None:
        """A new iteration; files of it and of later ones are of a run that went back."""
        self._iteration, self._updates = iteration, []
        for path in self._folder.glob("*.npz") if self._writes else ():
            if int(path.stem.removesuffix("-skipped")) >= iteration:
                path.unlink()

    def add(self, batches: Sequence[TrainBatch], sums: Mapping[str, np.ndarray]) -> None:
        """One more update; the file is written at once if it was skipped. Raises `DataError` when it cannot be."""
        if self._writes:
            self._updates.append(RecordedUpdate(list(batches), dict(sums)))
            if sums["skipped"]:
                write_updates(self._folder / f"{self._iteration}-skipped.npz", self._updates)

    def end(self) -> None:
        """Write the iteration if wanted and drop what is beyond the number kept."""
        if self._writes and any(update.sums["skipped"] for update in self._updates):
            write_updates(self._folder / f"{self._iteration}-skipped.npz", self._updates)  # with those after it
        if not self._writes or not self._keep:
            return
        write_updates(self._folder / f"{self._iteration}.npz", self._updates)
        files = {int(path.stem): path for path in self._folder.glob("*.npz") if path.stem.isdecimal()}
        for number in sorted(files)[: -self._keep]:
            files[number].unlink()


def write_updates(path: Path, updates: Sequence[RecordedUpdate]) -> None:
    """Write a file that is there in full or not at all; raises `DataError` when it cannot be written."""
    arrays = {}
    for number, update in enumerate(updates):
        arrays |= {f"{number}/sums/{name}": np.asarray(value) for name, value in update.sums.items()}
        for index, batch in enumerate(update.batches):
            fields = batch._replace(branches=None)._asdict() | (batch.branches._asdict() if batch.branches else {})
            arrays |= {f"{number}/{index}/{name}": value for name, value in fields.items() if value is not None}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(path, buffer.getbuffer())


def read_updates(run_dir: Path, iteration: int) -> list[RecordedUpdate]:
    """The recorded updates of an iteration, in order.

    Raises:
        DataError: none were kept, or the file is no such record.
    """
    names = (f"{iteration}.npz", f"{iteration}-skipped.npz")
    path = next((run_dir / FOLDER / name for name in names if (run_dir / FOLDER / name).is_file()), None)
    if path is None:
        kept = sorted({int(file.stem.partition("-")[0]) for file in (run_dir / FOLDER).glob("[0-9]*.npz")})
        raise DataError(
            f"{run_dir}: the updates of iteration {iteration} were not kept, only those of {kept}; "
            "run.updates_kept > 0 keeps those to come"
        )
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {tuple(name.split("/")): file[name] for name in file.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    updates: dict[int, dict[str, dict[str, np.ndarray]]] = {}
    for number, part, name in sorted(arrays):
        updates.setdefault(int(number), {}).setdefault(part, {})[name] = arrays[number, part, name]
    try:
        return [_update(parts) for _, parts in sorted(updates.items())]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: is not a record of updates of this version: {error}") from None


def _update(parts: dict[str, dict[str, np.ndarray]]) -> RecordedUpdate:
    sums = parts.pop("sums")
    return RecordedUpdate([_batch(parts[index]) for index in sorted(parts, key=int)], sums)


def _batch(arrays: dict[str, np.ndarray]) -> TrainBatch:
    branches = Branches(arrays.pop("ids"), arrays.pop("limits")) if "ids" in arrays else None
    return TrainBatch(**arrays, branches=branches)
