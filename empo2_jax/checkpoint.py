"""Checkpoints: one atomic step holds all that a run needs to go on bit for bit.

`checkpoints/<step>/` has `state/` (Orbax: parameters, optimizer, counters), `memory/`, `novelty/`, `rollouts/` (those
that ran ahead), `cursor.json` and `manifest.json` with a checksum of every file. It is written under a hidden name,
brought to the disk and appears by one rename; a kill leaves the previous step usable. A step whose manifest does not
hold is skipped and named. Nothing here knows what a tip or an optimizer is, and nothing is unpickled.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from empo2_jax import distributed
from empo2_jax.checkpoint_files import (
    canonical,
    files_problem,
    format_problem,
    hash_folder,
    kept_steps,
    read_object,
    require_space,
    sync,
    sync_tree,
    write_json,
    write_manifest,
)
from empo2_jax.errors import GUIDE, CheckpointError
from empo2_jax.interrupts import uninterrupted
from empo2_jax.metrics import METRICS_FILE, read_metrics, untimed

FOLDER = "checkpoints"

_log = logging.getLogger(__name__)


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Orbax's threads log with a traceback what Orbax also raises; one line of ours is enough."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class CheckpointStore:
    """The checkpoints of one run directory. One writer at a time (see `run_record.RunLock`); readers are free."""

    def __init__(self, run_dir: Path, keep: int, every: int = 0, best: int = 0) -> None:
        """What survives a save: the `keep` newest steps, those that `every` divides, the `best` by `val/score`."""
        self._run_dir = run_dir
        self._folder = run_dir / FOLDER
        self._keep, self._every, self._best = keep, every, best
        self._parent: int | None = None

    def steps(self) -> list[int]:
        """Steps with a directory, ascending; not yet verified."""
        if not self._folder.is_dir():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())

    @uninterrupted()
    def save(
        self,
        step: int,
        *,
        state: Any,
        dumps: Mapping[str, Callable[[Path], None]],
        cursor: dict[str, Any],
    ) -> Path:
        """Write one step and return its directory; the call returns when it is on the disk.

        Args:
            step: Number of the step; a directory of that number (one that did not verify) is replaced.
            state: Pytree of arrays.
            dumps: By the name of an empty folder, what writes into it: `memory`, `novelty` and what else there is.
            cursor: JSON values; `metrics_lines` is the number of lines of `metrics.jsonl` that belong to the step.

        Raises:
            CheckpointError: no space, or the folder cannot be written. Earlier steps stay as they were.
        """
        leaves = _named(state)
        draft, final = self._folder / f".tmp-{step}", self._folder / str(step)
        gang, what = distributed.current(), f"checkpoint {step}"

        def begin() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            for folder in (draft, *(draft / name for name in dumps)):
                folder.mkdir()
            require_space(draft / "reserve", sum(leaf.nbytes for leaf in leaves.values()))

        def complete() -> None:
            for name, dump in dumps.items():
                dump(draft / name)
            write_json(draft / "cursor.json", cursor)
            content = {name: hash_folder(draft / name) for name in dumps}
            self._write_manifest(draft, step, {"state": digest, **content})
            sync_tree(draft)
            self._publish(draft, step)

        try:
            gang.first(begin, what)
            with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save((draft / "state").absolute(), args=ocp.args.PyTreeSave(leaves))
            digest = _hash_leaves(leaves)
            gang.first(complete, what)
        except (OSError, ValueError) as error:  # Orbax reports a failed write as ValueError
            if gang.writes:
                shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(f"{final}: cannot save: {_first_line(error)}") from error
        gang.first(lambda: self._drop_others(step), what)
        self._parent = step
        return final

    def latest(self) -> int | None:
        """Newest step that verifies, None if there is none; each newer one that does not is named in a warning.

        Raises:
            CheckpointError: there are steps and none verifies, or a newer one is of another format.
        """
        return distributed.current().first(self._latest, "checkpoints")

    def _latest(self) -> int | None:
        bad = []
        for step in reversed(self.steps()):
            foreign = format_problem(self._folder / str(step))
            if foreign is not None:  # it may well be sound: going on from an older one would lose it
                raise CheckpointError(f"{self._folder / str(step)}: {foreign}")
            problem = self.problem(step)
            if problem is None:
                return step
            bad.append(problem)
            place = self._folder / str(step)
            _log.warning("checkpoint %s is skipped: %s; %scheckpoints-that-are-skipped", place, problem, GUIDE)
        if bad:
            raise CheckpointError(f"{self._folder}: no usable checkpoint; the newest is bad: {bad[0]}")
        return None

    @uninterrupted()
    def restore(self, step: int, abstract_state: Any, *, partial: bool = False) -> tuple[Any, Path, dict[str, Any]]:
        """Verify and load one step.

        Args:
            step: Number of the step.
            abstract_state: Pytree of arrays or `jax.ShapeDtypeStruct`; its structure, shapes, dtypes and shardings are
                those of the result.
            partial: Whether the checkpoint may hold leaves that `abstract_state` lacks; they are not read.

        Returns:
            The state, the step's directory (for what `dumps` wrote) and the cursor.

        Raises:
            CheckpointError: the step is missing or corrupt, or its state has other leaves, shapes or dtypes.
        """
        folder = Path(distributed.current().first(lambda: str(self._verified(step)), f"checkpoint {step}"))
        target = _named(abstract_state)
        placed = ocp.checkpoint_utils.construct_restore_args(target)
        arguments = ocp.args.PyTreeRestore(target, restore_args=placed, partial_restore=partial)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            path = (folder / "state").absolute()
            _check_leaves(folder, checkpointer.metadata(path).item_metadata.tree, target, partial)
            leaves = checkpointer.restore(path, args=arguments)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [leaves[name] for name in target])
        self._parent = step
        return state, folder, read_object(folder / "cursor.json")

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints newer than `step`: the run goes back to it, and nothing may continue from them."""

        def rename() -> None:
            for later in (number for number in self.steps() if number > step):
                aside = self._folder / f".aside-{later}"
                shutil.rmtree(aside, ignore_errors=True)
                (self._folder / str(later)).rename(aside)

        distributed.current().first(rename, "checkpoints")

    def verify(self) -> list[tuple[int, str | None]]:
        """Every step with what is wrong with it, or None."""
        return [(step, self.problem(step)) for step in self.steps()]

    def problem(self, step: int) -> str | None:
        """What is wrong with a step's files, None if they are what was written."""
        return files_problem(self._folder / str(step))

    def content_hash(self, step: int | None = None) -> str:
        """SHA-256 over the state, all that was dumped, and the metrics up to the step (None: the latest good one).

        Two runs of one configuration and seed have the same hash, whatever their times and file names.

        Raises:
            CheckpointError: no such step, or it does not verify.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"{self._folder}: no checkpoint")
        folder = self._verified(step)
        content = read_object(folder / "manifest.json")["content"]
        lines = read_object(folder / "cursor.json")["metrics_lines"]
        metrics = untimed(read_metrics(self._run_dir / METRICS_FILE)[:lines]) if lines else []
        if len(metrics) < lines:
            raise CheckpointError(f"{self._run_dir / METRICS_FILE}: {len(metrics)} lines, step {step} needs {lines}")
        return hashlib.sha256(canonical([content, metrics])).hexdigest()

    def recorded_state_hash(self, step: int) -> str:
        """`state_hash` of what a step holds, as its manifest says."""
        return read_object(self._verified(step) / "manifest.json")["content"]["state"]

    def _verified(self, step: int) -> Path:
        if step not in self.steps():
            raise CheckpointError(f"{self._folder / str(step)}: no such checkpoint; there are {self.steps()}")
        problem = self.problem(step)
        if problem is not None:
            raise CheckpointError(f"{self._folder / str(step)}: corrupt: {problem}")
        return self._folder / str(step)

    def _write_manifest(self, draft: Path, step: int, content: dict[str, str]) -> None:
        write_manifest(draft, {"step": step, "parent": self._parent, "content": content})

    def _publish(self, draft: Path, step: int) -> None:
        final = self._folder / str(step)
        if final.exists():
            final.rename(self._folder / f".old-{step}")
        draft.rename(final)
        sync(self._folder)

    def _drop_others(self, step: int) -> None:
        """Remove what is not to be kept, and steps after the restored one: those were skipped as corrupt."""
        steps = self.steps()
        abandoned = [] if self._parent is None else [other for other in steps if other > self._parent and other != step]
        own = [other for other in steps if other not in abandoned]
        kept = kept_steps(own, self._scores() if self._best else {}, self._keep, self._every, self._best)
        for other in steps:
            if other not in kept:
                (self._folder / str(other)).rename(self._folder / f".old-{other}")
        self._sweep()

    def _scores(self) -> dict[int, float]:
        """Score of the panel by iteration, where one was played to its end."""
        path = self._run_dir / METRICS_FILE
        records = read_metrics(path) if path.is_file() else []
        return {record["iteration"]: record["val/score"] for record in records if record.get("val/complete")}

    def _sweep(self) -> None:
        for path in self._folder.glob(".*-*"):
            shutil.rmtree(path)


def check_same_base(run_dir: Path, cursor: dict[str, Any], base: str, folder: Path) -> None:
    """Raise `CheckpointError` if a checkpoint's adapter is not one of the weights in `folder`, whose hash is `base`."""
    if cursor.get("base", "") != base:
        raise CheckpointError(f"{run_dir}: its adapter belongs to other weights than those in {folder}; restore these")


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by their path, so that what is stored does not depend on the classes of the containers."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _check_leaves(folder: Path, stored: dict[str, Any], target: dict[str, Any], partial: bool) -> None:
    for name in sorted(target.keys() - stored.keys() if partial else stored.keys() ^ target.keys()):
        where = "the checkpoint, not in the model" if name in stored else "the model, not in the checkpoint"
        raise CheckpointError(f"{folder}: the state does not fit: {name} is in {where}")
    for name, leaf in target.items():
        found = (tuple(stored[name].shape), np.dtype(stored[name].dtype))
        if found != (leaf.shape, leaf.dtype):
            raise CheckpointError(
                f"{folder}: the state does not fit: {name} is {found[1]}{list(found[0])} in the checkpoint, "
                f"{leaf.dtype}{list(leaf.shape)} in the model"
            )


def state_hash(state: Any) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of a state's leaves."""
    return _hash_leaves(_named(state))


def _hash_leaves(leaves: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for name in sorted(leaves):
        array = distributed.whole(leaves[name])
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).splitlines()[0]
