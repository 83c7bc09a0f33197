"""Ended episodes that no checkpoint holds yet, on the disk: a run that was killed in a rollout plays the rest alone.

For rollout servers, whose samples do not repeat themselves. The engine in this process makes the same episodes again,
bit for bit, so that nothing is kept there. An episode is taken up only by the iteration that it is of and under the
weights that sampled it: both are in the name of its file, and what newer weights sampled is dropped when a run goes on
from an older checkpoint. Every process appends to files of its own and reads all. Not the record of a run (`metrics`),
and nothing is trained on twice: files go once a checkpoint has the updates that were made on them.
"""

import base64
import dataclasses
import logging
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from typing_extensions import TypedDict

from empo2_jax.errors import GUIDE, DataError
from empo2_jax.metrics import JsonLines
from empo2_jax.progress import note
from empo2_jax.readers import parse_json, read_bytes
from empo2_jax.rollout.collect import Assignment, Ended
from empo2_jax.rollout.spread import from_bytes, to_bytes
from empo2_jax.types import Observation

FOLDER = "rollouts"
_log = logging.getLogger(__name__)


class _Line(TypedDict):
    told: bool
    observation: Observation
    episode: str


class Journals:
    """The journals of one run directory."""

    def __init__(self, run_dir: Path, process: int = 0) -> None:
        """`process` names the files that this process appends to."""
        self._folder, self._process = run_dir / FOLDER, process

    def open(self, iteration: int, version: int) -> "Journal":
        """That of a rollout that begins, or goes on, under a version of the weights."""
        return Journal(self._folder, f"{iteration}-{version}", self._process)

    def drop(self, first: int, version: int) -> None:
        """Remove what cannot be taken up any more; by one process, while no journal is open.

        Args:
            first: Iterations before it are over.
            version: Newer weights are not those of the run any more.
        """
        for path in self._folder.glob("*-*-*.jsonl"):
            iteration, sampled, _ = path.stem.split("-")
            if int(iteration) < first or int(sampled) > version:
                path.unlink()


class Journal:
    """Context manager around one rollout; a `collect.Keeper`."""

    def __init__(self, folder: Path, rollout: str, process: int) -> None:
        """Read what there is of the rollout, and cut the own file before what is damaged.

        Raises:
            DataError: the own file cannot be written.
        """
        own = folder / f"{rollout}-{process}.jsonl"
        found = {path: _read(path) for path in sorted(folder.glob(f"{rollout}-*.jsonl"))}
        self._known: dict[str, Ended] = {}
        for ended in (ended for part in found.values() for ended in part):
            before = self._known.get(ended.episode.id)
            if before is None or not before.told:  # a file of another process may have it without its tip
                self._known[ended.episode.id] = ended
        if self._known:
            note(f"{len(self._known)} episodes of this rollout had ended before and are kept")
        self._file = JsonLines(own, len(found.get(own, ())))

    def __enter__(self) -> "Journal":
        """Keep what ends from now on."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; it stays until `Journals.drop`."""
        self._file.close()

    def find(self, assignment: Assignment) -> Ended | None:
        """What an earlier process made of the same assignment."""
        ended = self._known.get(assignment.id)
        same = ended is not None and (ended.episode.task, ended.episode.mode) == (assignment.task, assignment.mode)
        return ended if same else None

    def keep(self, ended: Sequence[Ended]) -> None:
        """Bring these to the disk; raises `DataError` when it is full."""
        for episode, observation, told in ended:
            data = base64.b64encode(to_bytes([episode])).decode()
            said = dataclasses.asdict(observation)
            self._file.append({"id": episode.id, "told": told, "observation": said, "episode": data})


def _read(path: Path) -> list[Ended]:
    """What stands before the first damaged line; a torn last line is not said."""
    found = []
    try:
        for number, line in enumerate(read_bytes(path).splitlines(keepends=True), 1):
            if line.endswith(b"\n"):
                found.append(_ended(parse_json(line, _Line, f"line {number}")))
    except (DataError, KeyError, TypeError, ValueError, zlib.error) as error:
        _log.warning("%s: the rest of it is played again: %s; %sepisodes-played-again", path, error, GUIDE)
    return found


def _ended(line: _Line) -> Ended:
    (episode,), _ = from_bytes(base64.b64decode(line["episode"]))
    return Ended(episode, line["observation"], line["told"])
