"""A safetensors file whose bytes follow from names, shapes and dtype, and the checksum of a tensor.

The header is a pure function of its tensors, so writer and reader compute the same one and nothing is parsed that was
not checked. A checksum is a two-level SHA-256: blocks of 8 MiB are hashed on several cores and their digests again,
so that hashing is no slower than writing. Not a general reader: that is `models/hf_folder.py`.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt8

from empo2_jax.errors import SyncError

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "uint8": np.dtype(np.uint8)}
_CODES = {"float32": "F32", "bfloat16": "BF16", "uint8": "U8"}
_BLOCK = 1 << 20  # bytes under one CRC-32
_PIECE = 8 << 20  # bytes that one thread reads and checks at a time, a multiple of the block
_HEADER_LIMIT = 64 << 20  # bytes read of a file to say what is wrong with its header
_POOL = ThreadPoolExecutor(max_workers=min(16, len(os.sched_getaffinity(0))), thread_name_prefix="tensors")

Tensor = Shaped[np.ndarray, "..."]
Span = tuple[int, int]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Layout:
    """Where everything stands in a file; offsets in bytes from its beginning."""

    header: bytes
    spans: Mapping[str, Span]
    size: int


def layout(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Layout:
    """Layout of a file that holds tensors of these shapes, in this order and without gaps."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset, spans = 0, {}
    for name, shape in shapes.items():
        end = offset + int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        spans[name] = (offset, end)
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    start = len(header)
    return Layout(header, {name: (start + a, start + b) for name, (a, b) in spans.items()}, start + offset)


def write_tensors(path: Path, plan: Layout, tensors: Mapping[str, Tensor]) -> None:
    """Write a new file after its space is allocated, in the order of the layout.

    Raises:
        OSError: the disk, a quota or a limit does not allow it; the file may be there in part.
    """
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, plan.size)
        file.write(plan.header)
        for name in plan.spans:
            file.write(raw(tensors[name]).data)


def read_tensor(path: Path, span: Span, shape: tuple[int, ...], dtype: str) -> Tensor:
    """One tensor of a file whose layout is known."""
    size = int(np.prod(shape, dtype=np.int64))
    return np.fromfile(path, DTYPES[dtype], count=size, offset=span[0]).reshape(shape)


def raw(tensor: Tensor) -> UInt8[np.ndarray, " bytes"]:
    """The bytes of a tensor in row-major order, without a copy if they are so already."""
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def spread(function: Callable[..., Result], *arguments: Iterable[Any]) -> Iterator[Result]:
    """Like `map`, on all cores; for functions of large arrays, which must not call this themselves."""
    return _POOL.map(function, *arguments)


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Checksum of every tensor's bytes, as hex."""
    pieces = [[data[at:end] for at, end in _pieces((0, data.size))] for data in map(raw, tensors.values())]
    found = spread(_crcs, (piece.data for group in pieces for piece in group))
    return dict(zip(tensors, _combine(map(len, pieces), found), strict=True))


def file_checksums(path: Path, spans: Mapping[str, Span]) -> dict[str, str]:
    """The same of byte ranges of a file.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        number = file.fileno()
        pieces = [_pieces(span) for span in spans.values()]
        found = spread(
            lambda piece: _crcs(memoryview(os.pread(number, piece[1] - piece[0], piece[0]))),
            (piece for group in pieces for piece in group),
        )
        return dict(zip(spans, _combine(map(len, pieces), found), strict=True))


def same_bytes(path: Path, plan: Layout, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a file holds exactly these tensors in this layout."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != plan.size or file.read(len(plan.header)) != plan.header:
            return False
        number = file.fileno()
        pieces = (
            (raw(tensors[name])[at - span[0] : end - span[0]].data, at)
            for name, span in plan.spans.items()
            for at, end in _pieces(span)
        )
        return all(spread(lambda piece: os.pread(number, len(piece[0]), piece[1]) == piece[0], pieces))


def whole_checksum(path: Path) -> str:
    """Checksum of a file's bytes."""
    return file_checksums(path, {"": (0, path.stat().st_size)})[""]


def shard_checksum(header: bytes, tensors: Iterable[str]) -> str:
    """Checksum of a file from its header and the checksums of its tensors: no byte is hashed twice."""
    return hashlib.sha256(header + "".join(tensors).encode()).hexdigest()


def require_header(path: Path, plan: Layout) -> None:
    """Raise SyncError, naming the first tensor that differs, unless the file has this header."""
    with path.open("rb") as file:
        if file.read(len(plan.header)) == plan.header:
            return
        file.seek(0)
        found = _entries(file.read(_HEADER_LIMIT))
    wanted = _entries(plan.header)
    for name in [*(name for name in wanted if name not in found), *(name for name in found if name not in wanted)]:
        where = "is missing" if name in wanted else "is not in the manifest"
        raise SyncError(f"{path}: tensor {name} {where}")
    for name, entry in wanted.items():
        if found[name] != entry:
            raise SyncError(f"{path}: tensor {name} is {found[name]}, the manifest says {entry}")
    raise SyncError(f"{path}: the header does not match the manifest")


def _entries(content: bytes) -> dict[str, str]:
    """Dtype and shape of the tensors that a header names, as text; empty if it cannot be read."""
    try:
        parsed = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return {name: f"{e['dtype']} {e['shape']}" for name, e in parsed.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _pieces(span: Span) -> list[Span]:
    return [(at, min(at + _PIECE, span[1])) for at in range(*span, _PIECE)]


def _crcs(data: memoryview) -> bytes:
    return b"".join(zlib.crc32(data[at : at + _BLOCK]).to_bytes(4, "little") for at in range(0, len(data), _BLOCK))


def _combine(counts: Iterable[int], found: Iterator[bytes]) -> Iterator[str]:
    for count in counts:
        yield hashlib.sha256(b"".join(next(found) for _ in range(count))).hexdigest()
