"""Bytes on disk are a safetensors file; checksums see every byte."""

import hashlib
import resource
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from empo2_jax.errors import SyncError
from empo2_jax.sync import tensor_file
from empo2_jax.sync.tensor_file import (
    checksums,
    file_checksums,
    layout,
    read_tensor,
    require_header,
    whole_checksum,
    write_tensors,
)

TENSORS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "a": np.array([1.5], ml_dtypes.bfloat16),
    "none": np.zeros((0, 3), ml_dtypes.bfloat16),
}
SHAPES = {name: tensor.shape for name, tensor in TENSORS.items()}
PLAN = layout(SHAPES, "bfloat16")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tensors(tmp_path / "file", PLAN, TENSORS)
    return tmp_path / "file"


def test_safetensors_reads_what_is_written(path: Path) -> None:
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor)
        np.testing.assert_array_equal(read_tensor(path, PLAN.spans[name], tensor.shape, "bfloat16"), tensor)
    assert path.stat().st_size == PLAN.size
    assert len(PLAN.header) % 8 == 0


def test_a_transposed_view_is_written_in_its_own_order(tmp_path: Path) -> None:
    turned = {"a": np.arange(6, dtype=np.float32).reshape(2, 3).T}
    write_tensors(tmp_path / "file", layout({"a": (3, 2)}, "float32"), turned)
    np.testing.assert_array_equal(load_file(tmp_path / "file")["a"], turned["a"])


def test_checksum_of_memory_and_of_the_file_agree_in_blocks(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(tensor_file, "_BLOCK", 5)
    monkeypatch.setattr(tensor_file, "_PIECE", 10)
    found = checksums(TENSORS)
    assert found == file_checksums(path, PLAN.spans)
    data = TENSORS["b"].tobytes()
    blocks = b"".join(zlib.crc32(data[at : at + 5]).to_bytes(4, "little") for at in (0, 5, 10))
    assert found["b"] == hashlib.sha256(blocks).hexdigest()
    assert len(set(found.values())) == 3


def test_every_bit_of_a_file_counts(path: Path) -> None:
    content, seen = path.read_bytes(), set()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(changed)
        seen.add(whole_checksum(path))
    assert len(seen) == len(content)


def test_same_bytes_sees_every_difference(path: Path) -> None:
    assert tensor_file.same_bytes(path, PLAN, TENSORS)
    assert not tensor_file.same_bytes(path, PLAN, TENSORS | {"a": TENSORS["a"] * 2})
    assert not tensor_file.same_bytes(path, layout({"a": (1,)}, "bfloat16"), {"a": TENSORS["a"]})
    content = path.read_bytes()
    for changed in (content[:-1], content + b"x", b"\0" + content[1:]):
        path.write_bytes(changed)
        assert not tensor_file.same_bytes(path, PLAN, TENSORS)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"b": TENSORS["b"], "a": TENSORS["a"]}, "tensor none is missing"),
        (TENSORS | {"c": TENSORS["a"]}, "tensor c is not in the manifest"),
        (TENSORS | {"b": TENSORS["b"].T.copy()}, r"tensor b is BF16 \[3, 2\], the manifest says BF16 \[2, 3\]"),
        (TENSORS | {"a": np.array([1], np.int16)}, "tensor a is I16"),
    ],
)
def test_another_header_is_said_by_tensor(path: Path, tensors: dict[str, np.ndarray], message: str) -> None:
    require_header(path, PLAN)
    save_file(tensors, path)
    with pytest.raises(SyncError, match=message):
        require_header(path, PLAN)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, b"\x02" + bytes(7) + b"[]", b"\x0f" + bytes(7) + b'{"b": "no dict"}']
)
def test_garbage_instead_of_a_header_is_an_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(SyncError, match="tensor b is missing"):
        require_header(path, PLAN)


def test_no_space_is_found_before_the_first_byte(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PLAN.size - 1, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            write_tensors(tmp_path / "file", PLAN, TENSORS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "file").stat().st_size
