"""Every folder that an engine would take in silence, or die of, is refused with one line; leases hold and end."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from empo2_jax.errors import SyncError
from empo2_jax.sync.bundle import lease, read_bundle, unread
from empo2_jax.sync.manifest import FileEntry, Manifest, read_manifest
from empo2_jax.sync.orbax_publish import Publisher
from empo2_jax.sync.tensor_file import Tensor, whole_checksum
from tests.fixtures.published import CONFIG, O_PROJ, bf16, params

TREE = params()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    with Publisher(root, CONFIG, orbax=False, durable=False) as publisher:
        return publisher.publish(TREE, 1).wait()


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    return shutil.copytree(published, tmp_path / "1")


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / read_manifest(folder).tensors[tensor].file


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the tensors of the shard with O_PROJ and write it in the order of the manifest."""
    path = shard_of(folder, O_PROJ)
    tensors = load_file(path)
    tensors = {name: tensors[name] for name in read_manifest(folder).tensors if name in tensors}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def edit(folder: Path, **fields: object) -> None:
    """A manifest that is wrong but sealed, as a faulty writer would leave it."""
    replace(read_manifest(folder), **fields).write(folder)


def test_a_good_one_is_read(folder: Path) -> None:
    bundle = read_bundle(folder, CONFIG)
    assert bundle.version == 1
    for name, value in bf16(TREE).items():
        np.testing.assert_array_equal(bundle.read(name), value, err_msg=name)


def test_transposed_square_kernel_is_named(folder: Path) -> None:
    path = shard_of(folder, O_PROJ)
    begin, end = read_manifest(folder).shard(path.name).spans[O_PROJ]
    content = path.read_bytes()
    kernel = np.frombuffer(content[begin:end], np.uint16).reshape(16, 16)
    path.write_bytes(content[:begin] + kernel.T.tobytes() + content[end:])
    with pytest.raises(SyncError) as caught:
        read_bundle(folder, CONFIG)
    assert str(caught.value) == f"{path}: tensor {O_PROJ}: checksum does not match the manifest"


def test_one_flipped_bit_is_named(folder: Path) -> None:
    path = shard_of(folder, "lm_head.weight")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(SyncError, match=r"tensor lm_head\.weight: checksum does not match"):
        read_bundle(folder, CONFIG)


def test_truncated_file_is_named(folder: Path) -> None:
    path = shard_of(folder, O_PROJ)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(SyncError) as caught:
        read_bundle(folder, CONFIG)
    assert str(caught.value) == f"{path}: {size - 2} bytes, the manifest says {size}"


def test_missing_shard_is_named(folder: Path) -> None:
    path = shard_of(folder, O_PROJ)
    path.unlink()
    with pytest.raises(SyncError) as caught:
        read_bundle(folder, CONFIG)
    assert str(caught.value) == f"{path}: missing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({O_PROJ: t[O_PROJ].reshape(8, 32)}),
            rf"{O_PROJ} is BF16 \[8, 32\], the manifest says BF16",
        ),
        (lambda t: t.update({O_PROJ: t[O_PROJ].astype(np.float32)}), rf"{O_PROJ} is F32 \[16, 16\]"),
        (lambda t: t.pop(O_PROJ), rf"{O_PROJ} is missing"),
        (lambda t: t.update({"model.extra": t[O_PROJ]}), r"model\.extra is not in the manifest"),
    ],
)
def test_wrong_tensor_in_a_shard_is_named(
    folder: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(SyncError, match=message):
        read_bundle(folder, CONFIG)


def test_all_names_wrong_is_refused_though_the_manifest_agrees(folder: Path) -> None:
    manifest = read_manifest(folder)
    edit(folder, tensors={f"transformer.{name}": entry for name, entry in manifest.tensors.items()})
    with pytest.raises(SyncError, match=r"manifest\.json: tensor lm_head\.weight is missing"):
        read_bundle(folder, CONFIG)


def test_wrong_shape_is_refused_though_the_manifest_agrees(folder: Path) -> None:
    manifest = read_manifest(folder)
    tensors = {**manifest.tensors, O_PROJ: replace(manifest.tensors[O_PROJ], shape=(8, 32))}
    edit(folder, tensors=tensors)
    with pytest.raises(SyncError, match=rf"{O_PROJ} has shape \(8, 32\), the model has \(16, 16\)"):
        read_bundle(folder, CONFIG)


def test_only_one_layer_is_refused(folder: Path) -> None:
    tensors = {name: entry for name, entry in read_manifest(folder).tensors.items() if "layers.1" not in name}
    edit(folder, tensors=tensors)
    with pytest.raises(SyncError, match=r"tensor model\.layers\.1\.\S+ is missing"):
        read_bundle(folder, CONFIG)


def test_uint8_weights_are_refused(folder: Path) -> None:
    edit(folder, dtype="uint8")
    with pytest.raises(SyncError, match="float32 and bfloat16 are allowed"):
        read_bundle(folder, CONFIG)


def test_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(SyncError, match=r"layers\.2\.\S+ is missing"):
        read_bundle(folder, replace(CONFIG, num_layers=3))
    with pytest.raises(SyncError, match=r"config\.json: rope_theta is 10000\.0, the model has 1000000\.0"):
        read_bundle(folder, replace(CONFIG, rope_theta=1e6))


def test_a_file_that_engines_would_load_too_is_refused(folder: Path) -> None:
    shutil.copyfile(shard_of(folder, O_PROJ), folder / "stray.safetensors")
    with pytest.raises(SyncError, match=r"stray\.safetensors: not in the manifest"):
        read_bundle(folder, CONFIG)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_changed_json_is_refused(folder: Path, name: str) -> None:
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace("0", "1", 1))
    with pytest.raises(SyncError, match=rf"{name}: checksum does not match the manifest"):
        read_bundle(folder, CONFIG)


def test_config_that_is_wrong_though_the_manifest_agrees(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "gelu"}))
    files = read_manifest(folder).files
    edit(folder, files={**files, path.name: FileEntry(path.stat().st_size, whole_checksum(path))})
    with pytest.raises(SyncError, match=r"config\.json: hidden_act"):
        read_bundle(folder, CONFIG)


def test_an_empty_and_an_absent_folder_are_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SyncError, match=r"manifest\.json: No such file"):
            read_bundle(folder, CONFIG)


def made(folder: Path) -> Path:
    folder.mkdir()
    Manifest(1, None, "full", "float32", {}, {}).write(folder)
    return folder


def test_leases_are_shared_and_end(tmp_path: Path) -> None:
    folder = made(tmp_path / "1")
    with lease(folder), lease(folder), unread(folder) as free:
        assert not free
    with unread(folder) as free:
        assert free


def test_a_lease_on_what_was_deleted_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "1")
    shutil.rmtree(folder)
    with pytest.raises(SyncError, match="no such version"), lease(folder):
        pass


def test_a_reader_that_comes_during_a_deletion_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "1")
    waiter = (
        "import sys; from pathlib import Path; from empo2_jax.sync.bundle import lease\nprint(flush=True)\n"
        "with lease(Path(sys.argv[1])): pass"
    )
    with unread(folder) as free:
        assert free
        reader = subprocess.Popen([sys.executable, "-c", waiter, str(folder)], stdout=-1, stderr=-1, text=True)
        assert reader.stdout is not None
        reader.stdout.readline()
        folder.rename(tmp_path / ".old-1")
    _, errors = reader.communicate(timeout=60)
    assert "no such version" in errors or "the version was deleted" in errors


def test_the_lease_of_a_reader_that_died_ends(tmp_path: Path) -> None:
    folder = made(tmp_path / "1")
    holder = (
        "import sys, time; from pathlib import Path; from empo2_jax.sync.bundle import lease\n"
        "with lease(Path(sys.argv[1])):\n    print(flush=True); time.sleep(600)"
    )
    reader = subprocess.Popen([sys.executable, "-c", holder, str(folder)], stdout=subprocess.PIPE)
    assert reader.stdout is not None
    reader.stdout.readline()
    with unread(folder) as free:
        assert not free
    reader.kill()
    reader.communicate()
    with unread(folder) as free:
        assert free
