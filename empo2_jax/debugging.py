"""`empo2 debug`: the recorded updates of one iteration again, from the checkpoint before it, bit for bit.

Equal bits need the machine, the versions and the mesh of the run. Nothing of the run is changed.
"""

import math
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from empo2_jax import assembly
from empo2_jax.checkpoint import CheckpointStore, check_same_base, state_hash
from empo2_jax.errors import CheckpointError, ConfigError
from empo2_jax.learner.step import LearnerState
from empo2_jax.models.sharding import visible_devices
from empo2_jax.recorded_updates import read_updates
from empo2_jax.trained import run_config


def check(run_dir: Path, iteration: int, say: Callable[[str], None]) -> bool:
    """Say what every update gave; returns whether all of it, and the state after it, are those of the run."""
    updates, equal, number = rerun(run_dir, iteration), True, 0
    while True:
        try:
            update = next(updates)
        except StopIteration as end:
            after = {
                True: "is that of its checkpoint",
                False: "is NOT that of its checkpoint",
                None: "has no checkpoint",
            }
            say(f"the state after iteration {iteration} {after[end.value]}")
            return equal and end.value is not False
        number, equal = number + 1, equal and not update.differ
        same = f"DIFFERENT from the run: {', '.join(update.differ)}" if update.differ else "equal to the run"
        skipped = ", skipped" if update.skipped else ""
        say(f"update {number}: loss {update.loss:.9g}, gradient norm {update.grad_norm:.9g}{skipped}: {same}")


class Rerun(NamedTuple):
    """One update again; `differ` names the sums that are not bit for bit those of the run."""

    loss: float
    grad_norm: float
    skipped: bool
    differ: list[str]


def rerun(run_dir: Path, iteration: int) -> Generator[Rerun, None, bool | None]:
    """Yield the updates of an iteration; returns whether the state after them is that of its checkpoint (None: gone).

    Raises:
        DataError: the run did not keep these updates.
        CheckpointError: the checkpoint before the iteration is gone, or its adapter belongs to other weights.
        ConfigError: the run had more devices than are here.
    """
    config, updates = run_config(run_dir), read_updates(run_dir, iteration)
    if (devices := math.prod(config.model.mesh)) > (here := len(visible_devices())):
        raise ConfigError(
            f"{run_dir}: its updates were made on {devices} devices (model.mesh = {list(config.model.mesh)}), here are "
            f"{here}; equal bits need the same mesh, so a machine with {devices} is needed (on CPUs "
            f"JAX_NUM_CPU_DEVICES={devices})"
        )
    store = CheckpointStore(run_dir, config.checkpoint.keep)
    steps = store.steps()
    if iteration - 1 not in steps:
        raise CheckpointError(
            f"{run_dir}: iteration {iteration} begins at checkpoint {iteration - 1}, and there are {steps}; "
            "checkpoint.every = 1 and a larger checkpoint.keep leave them"
        )
    start = run_dir / "start" if config.warmstart.updates else None
    policy = assembly.load_policy(config.model, start)
    parts = assembly.learner_parts(config, policy)
    learner = assembly.make_learner(config, parts.graphdef, parts.frozen, policy.mesh)
    restored, _, cursor = store.restore(iteration - 1, learner.init(parts.trainable))
    check_same_base(run_dir, cursor, parts.base, policy.folder)
    state = LearnerState(*restored)
    for update in updates:
        state, sums = learner.update(state, update.batches)
        names = sorted(sums.keys() | update.sums.keys())
        differ = [name for name in names if not _same(sums.get(name), update.sums.get(name))]
        yield Rerun(float(sums["loss"]), float(sums["grad_norm"]), bool(sums["skipped"]), differ)
    return state_hash(state) == store.recorded_state_hash(iteration) if iteration in steps else None


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other, equal_nan=True)
