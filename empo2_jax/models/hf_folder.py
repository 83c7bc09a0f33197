"""A Hugging Face model folder as files: `config.json`, safetensors shards with their index, tokenizer files.

Reads and writes named numpy tensors and knows neither the model nor JAX. A folder appears complete or not at all: it is
written beside its place and renamed.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Shaped
from pydantic import AfterValidator, BaseModel
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from empo2_jax.errors import DataError
from empo2_jax.readers import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
Tensor = Shaped[np.ndarray, "..."]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, as UTF-8."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _beside(file: str) -> str:
    if Path(file).name != file or file in ("", ".."):
        raise ValueError("the name of a file beside it is allowed")
    return file


class Index(BaseModel):
    """What is read of an index."""

    weight_map: dict[str, Annotated[str, AfterValidator(_beside)]]  # tensor to file; never a path


class TensorReader:
    """Random access to the tensors of a folder by name; shards are memory-mapped, one tensor is read at a time."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._file_of: dict[str, str]
        if (folder / INDEX).exists():
            self._file_of = read_json(folder / INDEX, Index).weight_map
        elif (folder / SINGLE).exists():
            with _opened(folder / SINGLE) as file:
                self._file_of = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise DataError(f"{folder}: no weights; expected {SINGLE} or {INDEX}")

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._file_of)

    def check_files(self) -> None:
        """Raise `DataError` where a file is missing or shorter than its header says."""
        for name in sorted(set(self._file_of.values())):
            with _opened(self._folder / name):
                pass

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in its stored dtype; raises DataError when it is missing, unreadable or not of `shape`."""
        if name not in self._file_of:
            raise DataError(f"{self._folder}: tensor {name} is missing")
        path = self._folder / self._file_of[name]
        with _opened(path) as file:
            try:
                tensor = file.get_tensor(name)
            except SafetensorError as error:
                raise DataError(f"{path}: tensor {name} cannot be read: {error}") from error
        if tensor.shape != shape:
            raise DataError(f"{path}: tensor {name} has shape {tensor.shape}, the config asks for {shape}")
        return tensor


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    try:
        file = safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise DataError(f"{path}: file not found, but the index names it") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: truncated or not a safetensors file: {error}") from error
    with file:
        yield file


@contextmanager
def new_folder(folder: Path) -> Generator[Path]:
    """A temporary folder that becomes `folder` when the block ends well and vanishes when it does not.

    Raises:
        DataError: `folder` exists and is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder}: exists and is not empty; choose another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
        work = Path(place) / "work"
        work.mkdir()
        yield work
        work.rename(folder)


def write_tensors(
    folder: Path,
    sizes: Mapping[str, int],
    read: Callable[[str], Tensor],
    max_shard_bytes: int,
) -> None:
    """Write safetensors shards and, if there is more than one, their index.

    Args:
        folder: Existing folder.
        sizes: Bytes of each tensor, in the order of writing.
        read: Gives a tensor by name; called once per tensor, one shard is held in memory at a time.
        max_shard_bytes: Limit of a shard; a larger tensor gets a shard of its own.

    Raises:
        DataError: a file cannot be written.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = [SINGLE]
    for file, names in zip(files, shards, strict=True):
        write_file(folder / file, {name: read(name) for name in names})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file; raises DataError if it cannot be written."""
    try:
        save_file(
            {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
        )
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be written: {error}") from error
    path.chmod(0o644)  # written as private; engines and colleagues read it too


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, and the generation config that names its stop ids.

    Raises:
        DataError: `source` has no tokenizer.json.
    """
    if not (source / "tokenizer.json").exists():
        raise DataError(f"{source}: no tokenizer.json to copy")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
