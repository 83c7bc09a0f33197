"""Checkpoints: equal after a round trip, atomic under kill −9, honest about corruption."""

import json
import logging
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from empo2_jax.checkpoint import CheckpointStore
from empo2_jax.errors import CheckpointError
from empo2_jax.metrics import MetricsLog
from empo2_jax.run_record import RunLock


def make_state(seed: int = 0) -> dict[str, Any]:
    params = nnx.state(nnx.Linear(3, 5, rngs=nnx.Rngs(seed)), nnx.Param)
    return {"params": params, "opt": optax.adamw(1e-3).init(params), "updates": jnp.int32(seed)}


def save(store: CheckpointStore, step: int, seed: int = 0, lines: int = 0, memory: str = "a tip") -> None:
    store.save(
        step,
        state=make_state(seed),
        dumps={
            "memory": lambda folder: (folder / "tips.json").write_text(memory) and None,
            "novelty": lambda folder: np.save(folder / "states.npy", np.arange(3.0)),
        },
        cursor={"iteration": step, "metrics_lines": lines},
    )


def spoil(run_dir: Path, step: int, name: str = "memory/tips.json") -> None:
    (run_dir / "checkpoints" / str(step) / name).write_text("another tip")


def test_round_trip_keeps_every_bit_and_the_abstract_sharding(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 4, seed=3)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), make_state())

    state, folder, cursor = store.restore(4, abstract)

    chex.assert_trees_all_equal(state, make_state(3), strict=True)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(state))
    assert (folder / "memory" / "tips.json").read_text() == "a tip"
    assert cursor == {"iteration": 4, "metrics_lines": 0}


def test_state_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    wider = make_state() | {"updates": jnp.zeros(2, jnp.int32)}
    with pytest.raises(CheckpointError, match=r"updates.* is int32\[\] in the checkpoint, int32\[2\] in the model"):
        store.restore(1, wider)
    with pytest.raises(CheckpointError, match=r"extra.* is in the model, not in the checkpoint"):
        store.restore(1, make_state() | {"extra": jnp.zeros(1)})


def test_a_part_of_the_state_can_be_restored_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1, seed=5)
    part, _, _ = store.restore(1, {"params": make_state()["params"]}, partial=True)
    chex.assert_trees_all_equal(part, {"params": make_state(5)["params"]}, strict=True)
    with pytest.raises(CheckpointError, match="is in the model, not in the checkpoint"):
        store.restore(1, {"weights": make_state()["params"]}, partial=True)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        save(store, step)
    assert store.steps() == [2, 10]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["10", "2"]
    manifest = json.loads((tmp_path / "checkpoints/10/manifest.json").read_text())
    assert manifest["parent"] == 2


def test_periodic_and_best_steps_outlive_the_newest(tmp_path: Path) -> None:
    log, store = MetricsLog(tmp_path), CheckpointStore(tmp_path, keep=1, every=4, best=2)
    scores = {1: 10.0, 2: 90.0, 3: 90.0, 4: 20.0, 5: 95.0, 6: 99.0, 7: 0.0}
    for step in range(1, 10):
        panel = {"val/score": scores[step], "val/complete": float(step != 6)} if step in scores else {}
        log.write(step, panel)
        save(store, step, lines=step)
    log.close()
    assert store.steps() == [3, 4, 5, 8, 9]  # of 2 and 3 the newer; 6 was not played to its end
    assert all(problem is None for _, problem in store.verify())


@pytest.mark.parametrize("found", [0, 2])
def test_a_checkpoint_of_another_format_is_refused_and_not_skipped(tmp_path: Path, found: int) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    save(store, 2)
    manifest = tmp_path / "checkpoints/2/manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', f'"format": {found}'))
    said = rf"2: format {found}, this version reads 1; use the version of empo2_jax that wrote it"
    with pytest.raises(CheckpointError, match=said):
        store.latest()
    with pytest.raises(CheckpointError, match=f"2: corrupt: manifest.json: format {found}"):
        store.restore(2, make_state())
    assert store.steps() == [1, 2]


def test_corrupt_newest_is_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(store, step)
    spoil(tmp_path, 3)
    with caplog.at_level(logging.WARNING):
        assert store.latest() == 2
    assert "checkpoints/3 is skipped: memory/tips.json: checksum does not match" in caplog.text
    assert store.verify() == [(1, None), (2, None), (3, "memory/tips.json: checksum does not match")]
    with pytest.raises(CheckpointError, match=r"3: corrupt: memory/tips\.json"):
        store.restore(3, make_state())

    store.restore(2, make_state())
    save(store, 3)
    assert store.verify() == [(1, None), (2, None), (3, None)]


def test_a_corrupt_later_step_does_not_push_out_good_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 6)
    wide = CheckpointStore(tmp_path, keep=9)
    save(wide, 9)
    spoil(tmp_path, 9)
    store.restore(6, make_state())
    save(store, 7)
    assert store.steps() == [7]


@pytest.mark.parametrize("damage", ["missing", "extra", "manifest", "no manifest"])
def test_every_damage_is_found(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    folder = tmp_path / "checkpoints" / "1"
    manifest = folder / "manifest.json"
    if damage == "missing":
        (folder / "cursor.json").unlink()
    elif damage == "extra":
        (folder / "memory" / "more").write_text("x")
    elif damage == "manifest":
        manifest.write_text(manifest.read_text().replace('"parent": null', '"parent": 7'))
    else:
        manifest.unlink()
    assert store.problem(1) is not None
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        store.latest()


def test_hash_ignores_times_and_sees_everything_else(tmp_path: Path) -> None:
    def run(name: str, **changes: Any) -> str:
        folder = tmp_path / name
        log = MetricsLog(folder)
        log.write(1, {"reward/mean": changes.pop("reward", 0.5), "timing_s/update": changes.pop("time", 1.0)})
        log.write(2, {"reward/mean": 99.0})  # after the checkpoint
        log.close()
        store = CheckpointStore(folder, keep=1)
        save(store, 1, lines=1, **changes)
        return store.content_hash()

    first = run("a")
    assert first == run("b", time=2.0)
    others = {run("c", reward=0.6), run("d", seed=1), run("e", memory="a tap")}
    assert len(others) == 3 and first not in others


def test_hash_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        CheckpointStore(tmp_path, keep=1).content_hash()
    with pytest.raises(CheckpointError, match="5: no such checkpoint"):
        CheckpointStore(tmp_path, keep=1).content_hash(5)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file stands in the way")
    with pytest.raises(CheckpointError, match="cannot save: File exists"):
        save(CheckpointStore(tmp_path, keep=1), 1)


def test_no_space_for_the_state_is_known_before_anything_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(CheckpointError, match=r"2: cannot save: needs 0\.0 MiB: File too large"):
            save(store, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert store.verify() == [(1, None)]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]


def test_disk_that_fills_while_dumping_leaves_no_trace(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)

    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="cannot save: No space left on device"):
        store.save(1, state=make_state(), dumps={"memory": fail}, cursor={"metrics_lines": 0})
    assert list((tmp_path / "checkpoints").iterdir()) == []


KILLED = """
import sys, time
from pathlib import Path
import jax.numpy as jnp
from empo2_jax.checkpoint import CheckpointStore
from empo2_jax.run_record import RunLock
folder = Path(sys.argv[1])
def stuck(place):
    (place / "half").write_text("half")
    print("in the middle", flush=True)
    time.sleep(600)
with RunLock(folder):
    store = CheckpointStore(folder, keep=3)
    write = lambda place: None
    for step, dump in ((1, write), (2, stuck)):
        store.save(step, state={"w": jnp.arange(4.0)}, dumps={"memory": write, "novelty": dump},
                   cursor={"metrics_lines": 0})
"""


def test_kill_in_mid_save_leaves_the_previous_step_and_frees_the_lock(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "in the middle\n"
        with pytest.raises(CheckpointError, match="another process is using this directory"), RunLock(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)

    store = CheckpointStore(tmp_path, keep=3)
    assert (tmp_path / "checkpoints" / ".tmp-2").is_dir()
    assert store.verify() == [(1, None)]
    deadline = time.monotonic() + 10
    with RunLock(tmp_path):
        state, _, _ = store.restore(1, {"w": jax.ShapeDtypeStruct((4,), jnp.float32)})
        np.testing.assert_array_equal(np.asarray(state["w"]), [0, 1, 2, 3])
        save(store, 2)
    assert time.monotonic() < deadline
    assert store.steps() == [1, 2] and not (tmp_path / "checkpoints" / ".tmp-2").exists()
