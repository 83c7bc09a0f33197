"""What is published is what the parameters are, for torch, for Orbax and for us; faults leave the last version."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from empo2_jax.errors import SyncError
from empo2_jax.models.hf_weights import load_model, named
from empo2_jax.sync.bundle import lease, read_bundle
from empo2_jax.sync.delta import Receiver
from empo2_jax.sync.manifest import latest, read_manifest, versions
from empo2_jax.sync.orbax_publish import Publisher, restore
from tests.fixtures.processes import LIMIT_S, ROOT
from tests.fixtures.published import CONFIG, bf16, file_limit, nudged, params

TREE = params()


@contextmanager
def publisher(root: Path, **options: object) -> Generator[Publisher]:
    with Publisher(root, CONFIG, **{"orbax": False, "durable": False, **options}) as made:
        yield made


def values_of(model: object) -> dict[str, np.ndarray]:
    return {name: np.asarray(variable[...]) for name, variable in named(nnx.state(model, nnx.Param)).items()}


def test_torch_gives_the_logits_of_its_own_cast(tmp_path: Path) -> None:
    with publisher(tmp_path) as made:
        folder = made.publish(TREE, 3).wait()
    assert folder == tmp_path / "3" == latest(tmp_path)
    peer = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    exact = transformers.Qwen2ForCausalLM(peer.config).float()
    exact.load_state_dict({name: torch.tensor(np.asarray(v[...])) for name, v in named(TREE).items()})
    wanted = exact.to(torch.bfloat16)
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(tensor, peer.state_dict()[name]), name
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(peer.eval()(ids).logits, wanted.eval()(ids).logits)


def test_f32_is_a_plain_copy_that_outlives_donation(tmp_path: Path) -> None:
    update = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2 + 1, tree), donate_argnums=0)
    mine = jax.tree.map(jnp.copy, TREE)
    with publisher(tmp_path, dtype="float32", shards=1, keep=9) as made:
        for version in range(4):
            pending = made.publish(mine, version)
            before, mine = mine, update(mine)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
            loaded, wanted = values_of(load_model(pending.wait())), TREE
            for _ in range(version):
                wanted = jax.tree.map(lambda leaf: leaf * 2 + 1, wanted)
            for name, variable in named(wanted).items():
                np.testing.assert_allclose(loaded[name], variable[...], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_orbax_copy_restores_what_was_published(tmp_path: Path, dtype: object) -> None:
    with publisher(tmp_path, orbax=True) as made:
        made.publish(TREE, 1)
        folder = made.publish(nudged(TREE), 2).wait()
    bundle = read_bundle(folder, CONFIG)
    restored = restore(bundle, jax.tree.map(lambda leaf: leaf.astype(dtype), TREE))
    assert jax.tree.structure(restored) == jax.tree.structure(TREE)
    for name, value in bf16(nudged(TREE)).items():
        assert named(restored)[name][...].dtype == dtype
        np.testing.assert_array_equal(named(restored)[name][...], value.astype(dtype), err_msg=name)


def test_a_version_without_orbax_copy_says_so(tmp_path: Path) -> None:
    with publisher(tmp_path) as made:
        bundle = read_bundle(made.publish(TREE, 1).wait(), CONFIG)
    with pytest.raises(SyncError, match="has no Orbax copy"):
        restore(bundle, TREE)


def test_shards_index_and_parent(tmp_path: Path) -> None:
    with publisher(tmp_path) as made:
        made.publish(TREE, 1)
        folder = made.publish(nudged(TREE), 7).wait()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert index["metadata"]["total_size"] == 2 * CONFIG.num_parameters
    sizes = [(folder / file).stat().st_size for file in files]
    assert max(sizes) < 0.6 * sum(sizes)
    manifest = read_manifest(folder)
    assert (manifest.version, manifest.kind, manifest.dtype) == (7, "full", "bfloat16")
    assert manifest.parent == read_manifest(tmp_path / "1").reference
    for name, value in bf16(nudged(TREE)).items():
        np.testing.assert_array_equal(read_bundle(folder, CONFIG).read(name), value, err_msg=name)


def test_only_the_changed_shard_is_written(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    with publisher(tmp_path / "root", tokenizer_folder=tokenizer) as made:
        first = made.publish(TREE, 1).wait()
        second = made.publish(nudged(TREE, only="lm_head"), 2).wait()
    shared = {path.name for path in first.iterdir() if path.samefile(second / path.name)}
    manifest = read_manifest(second)
    changed = manifest.tensors["lm_head.weight"].file
    shards = {entry.file for entry in manifest.tensors.values()}
    assert shared == shards - {changed} | {"tokenizer.json"}
    assert not (first / "tokenizer.json").samefile(tokenizer / "tokenizer.json")
    read_bundle(first, CONFIG)
    shutil.rmtree(first)
    read_bundle(second, CONFIG)


def test_old_versions_go_when_nobody_reads_them(tmp_path: Path) -> None:
    with publisher(tmp_path, keep=2) as made:
        first = made.publish(TREE, 1).wait()
        with lease(first):
            for version in (2, 3, 4):
                made.publish(nudged(TREE, 1 + version / 50), version).wait()
            assert versions(tmp_path) == [1, 3, 4]
            read_bundle(first, CONFIG)
        made.publish(TREE, 5).wait()
    assert versions(tmp_path) == [4, 5]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".old", ".draft"))]


def test_versions_never_go_back_unless_the_run_does(tmp_path: Path) -> None:
    with publisher(tmp_path, keep=9) as made:
        for version in (1, 2, 3):
            made.publish(nudged(TREE, 1 + version / 50), version)
        with pytest.raises(SyncError, match="version 3 after 3; published versions never go back"):
            made.publish(TREE, 3)
        made.set_aside_from(2)
        assert versions(tmp_path) == [1]
        again = made.publish(TREE, 2).wait()
    assert read_manifest(again).parent == read_manifest(tmp_path / "1").reference
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writer", "1", "2"]


def test_deltas_between_full_versions_give_the_same_bytes(tmp_path: Path) -> None:
    trees = {version: nudged(TREE, 1 + version / 4096) for version in range(1, 7)}
    receiver = Receiver(tmp_path, CONFIG)
    with publisher(tmp_path, full_every=3, keep=1) as made:
        for version, tree in trees.items():
            made.publish(tree, version).wait()
            for name, value in bf16(tree).items():
                np.testing.assert_array_equal(receiver.follow()[name], value, err_msg=name)
    kinds = {version: read_manifest(tmp_path / str(version)).kind for version in versions(tmp_path)}
    assert kinds == {4: "full", 5: "delta", 6: "delta"}  # version 6 needs 5, and 5 needs 4
    fresh = Receiver(tmp_path, CONFIG).follow()
    assert all(np.array_equal(fresh[name], value) for name, value in bf16(trees[6]).items())


def test_another_model_is_refused(tmp_path: Path) -> None:
    with publisher(tmp_path) as made, pytest.raises(SyncError, match=r"another model; first difference at lm_head"):
        made.publish(params(config=replace(CONFIG, tie_embeddings=True)), 1)
    assert not versions(tmp_path)


def test_one_writer_per_folder(tmp_path: Path) -> None:
    with publisher(tmp_path), pytest.raises(SyncError, match="another process publishes here"):
        Publisher(tmp_path, CONFIG)
    with publisher(tmp_path) as made:
        made.publish(TREE, 1)
    assert versions(tmp_path) == [1]


def test_full_disk_is_said_at_the_next_call_and_costs_nothing(tmp_path: Path) -> None:
    with publisher(tmp_path) as made:
        made.publish(TREE, 1).wait()
        with file_limit(2000):
            pending = made.publish(nudged(TREE), 2)
            while not pending.done:
                pass
        with pytest.raises(SyncError, match=r"/2: cannot be written: File too large$"):
            made.publish(nudged(TREE), 3)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".writer", "1"]
        read_bundle(tmp_path / "1", CONFIG)
        read_bundle(made.publish(nudged(TREE), 3).wait(), CONFIG)


def test_full_disk_is_said_before_orbax_starts(tmp_path: Path) -> None:
    with publisher(tmp_path, orbax=True) as made:
        with file_limit(2000), pytest.raises(SyncError, match=r"/1: cannot be written: needs 0.0 MiB: File too large$"):
            made.publish(TREE, 1).wait()
        assert [path.name for path in tmp_path.iterdir()] == [".writer"]
        read_bundle(made.publish(TREE, 1).wait(), CONFIG)


FULL = """
from pathlib import Path
import pytest
from empo2_jax.errors import SyncError
from empo2_jax.sync import orbax_publish
from empo2_jax.sync.bundle import read_bundle
from empo2_jax.sync.manifest import versions
from tests.fixtures.published import CONFIG, file_limit, nudged, params
root, tree = Path({root!r}), params()
orbax_publish.require_space = lambda path, size: None
with orbax_publish.Publisher(root, CONFIG, durable=False) as made:
    made.publish(tree, 1).wait()
    with file_limit(3000), pytest.raises(SyncError, match="/2: cannot be written: "):
        made.publish(nudged(tree), 2).wait()
    assert versions(root) == [1]
    (late := root / ".draft-late").mkdir()  # as TensorStore's threads may, even after Orbax's error
    read_bundle(made.publish(nudged(tree), 2).wait(), CONFIG)
    assert versions(root) == [1, 2]
    assert not late.exists()
print("one error")
"""


def test_disk_that_fills_up_under_orbax_is_one_error(tmp_path: Path, run_on_devices: Callable[[int, str], str]) -> None:
    # In a process of its own: TensorStore's threads still call the closed event loop of the failed save, at any time
    # afterwards, and the next test would be blamed for it.
    assert run_on_devices(1, FULL.format(root=str(tmp_path))).endswith("one error\n")


def test_error_nobody_asked_for_is_said_at_the_end(tmp_path: Path) -> None:
    made = Publisher(tmp_path, CONFIG, orbax=False)
    with file_limit(2000), pytest.raises(SyncError, match="too large"):
        made.publish(TREE, 1)
        made.close()
    with publisher(tmp_path) as again:  # the folder is free
        again.publish(TREE, 1).wait(60.0)


def test_error_that_was_waited_for_is_not_said_twice(tmp_path: Path) -> None:
    with publisher(tmp_path) as made:
        with file_limit(2000), pytest.raises(SyncError, match="too large"):
            made.publish(TREE, 1).wait()
        made.publish(TREE, 1).wait()


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"keep": 0}, {"shards": 0}, {"full_every": 0}])
def test_impossible_values_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(SyncError, match="are allowed"):
        Publisher(tmp_path, CONFIG, **options)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"no tokenizer\.json"):
        Publisher(tmp_path / "root", CONFIG, tokenizer_folder=tmp_path)


def test_parameters_on_a_mesh_come_out_whole(tmp_path: Path, run_on_devices: Callable[[int, str], str]) -> None:
    source = f"""
import jax, numpy as np
from pathlib import Path
from empo2_jax.models.sharding import make_mesh, shardings
from empo2_jax.sync.bundle import read_bundle
from empo2_jax.sync.orbax_publish import Publisher, restore
from tests.fixtures.processes import LIMIT_S, ROOT
from tests.fixtures.published import CONFIG, bf16, params
tree = params()
placed = jax.device_put(tree, shardings(tree, make_mesh(jax.devices(), 1, 2, 2)))
with Publisher(Path({str(tmp_path)!r}), CONFIG) as made:
    bundle = read_bundle(made.publish(placed, 1).wait(), CONFIG)
assert all(np.array_equal(bundle.read(name), value) for name, value in bf16(tree).items())
print("equal")
"""
    assert run_on_devices(4, source).endswith("equal\n")


PROCESS = """
import sys
from pathlib import Path
import jax, numpy as np
from empo2_jax.models.sharding import make_mesh, shardings
from empo2_jax.sync.bundle import read_bundle
from empo2_jax.sync.orbax_publish import Publisher, restore
from empo2_jax.models.hf_weights import named
from tests.fixtures.processes import LIMIT_S, ROOT
from tests.fixtures.published import CONFIG, bf16, params
root, address, process = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(address, 2, process, initialization_timeout=120)
tree = params()
places = shardings(tree, make_mesh(jax.devices(), 1, 2, 2))
spread = lambda value, place: jax.make_array_from_callback(value.shape, place, np.asarray(value).__getitem__)
placed = jax.tree.map(spread, tree, places)
with Publisher(root, CONFIG, timeout_s=60) as publisher:
    for version in (1, 2):
        bundle = read_bundle(publisher.publish(placed, version).wait(), CONFIG)
    found = named(restore(bundle, placed))
for name, value in bf16(tree).items():
    assert np.array_equal(bundle.read(name), value), name
    for part in found[name][...].addressable_shards:
        assert np.array_equal(part.data, value[part.index].astype(np.float32)), name
print("equal")
"""


@pytest.mark.medium
def test_two_processes_write_one_version(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PJRT_NPROC": "32"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), address, str(process)],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    results = [process.communicate(timeout=LIMIT_S) for process in started]
    assert all(output.endswith("equal\n") for output, _ in results), [errors[-3000:] for _, errors in results]
    shard = "model-00002-of-00004.safetensors"  # of the second process; nothing changed in version 2
    assert (tmp_path / "1" / shard).samefile(tmp_path / "2" / shard)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writer", "1", "2"]
