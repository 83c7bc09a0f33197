"""Load and save Qwen2 weights as Hugging Face folders.

Attribute paths of the model equal tensor names and kernels share their orientation, so both ways are plain copies,
one tensor at a time. Tokenizers are `models/tokenizer.py`.
"""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike, Float

from empo2_jax.errors import DataError
from empo2_jax.models.hf_folder import TensorReader, copy_tokenizer, new_folder, write_json, write_tensors
from empo2_jax.models.qwen2 import Qwen2, Qwen2Config
from empo2_jax.models.qwen2_config import read_config
from empo2_jax.models.sharding import check_divides, shardings, visible_devices
from empo2_jax.models.tensor_names import tensor_shapes
from empo2_jax.ops.attention_kernels import platform_of, resolve

Params = Mapping[Any, Any]  # an `nnx.State`, whose own annotation the run-time type checker cannot read


def check_tensors(folder: Path) -> Qwen2Config:
    """Architecture of a folder whose weights have all its tensors, by their names; no value is read.

    Raises:
        DataError: a file or tensor is missing, truncated or unknown.
        ConfigError: config.json has a key that cannot be honored.
    """
    config, reader = read_config(folder), TensorReader(folder)
    reader.check_files()
    _check_names(folder, reader.names, tensor_shapes(config).keys(), config)
    return config


def weights_hash(folder: Path) -> str:
    """SHA-256 over names, shapes and f32 values of a folder's weights, whatever their files and stored dtype.

    Raises:
        DataError: a file or tensor is missing, truncated or of the wrong shape.
    """
    config, reader, digest = read_config(folder), TensorReader(Path(folder)), hashlib.sha256()
    params = nnx.split(nnx.eval_shape(lambda: Qwen2(config, rngs=nnx.Rngs(0))))[1]
    for name, variable in sorted(named(params).items()):
        digest.update(f"{name} {variable.shape}\n".encode())
        digest.update(np.ascontiguousarray(reader.read(name, variable.shape), np.float32).data)
    return digest.hexdigest()


def load_model(
    folder: Path, *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None, attention: str = "xla"
) -> Qwen2:
    """Read a folder into a model with f32 parameters that computes in `dtype`.

    With a mesh every parameter is placed by `sharding.shardings`; without one it goes to the default device.
    `attention` is `model.attention` of the configuration and resolved here, for the devices of the parameters.

    Raises:
        DataError: a file or tensor is missing, truncated, of the wrong shape or unknown; named in the message.
        ConfigError: config.json has a key that cannot be honored, a size does not divide over the mesh, or these
            devices cannot run that attention.
    """
    folder = Path(folder)
    config = read_config(folder)
    if mesh is not None:
        check_divides(config, mesh.shape["fsdp"], mesh.shape["tensor"])
    device = visible_devices()[0] if mesh is None else mesh.devices.flat[0]
    kernel = resolve(attention, platform_of(device), dtype, config.head_dim)
    abstract = nnx.eval_shape(lambda: Qwen2(config, rngs=nnx.Rngs(0), dtype=dtype, attention=kernel))
    graph, params = nnx.split(abstract)
    reader = TensorReader(folder)
    _check_names(folder, reader.names, named(params).keys(), config)
    places = {}
    if mesh is not None:
        places = {name: place.get_raw_value() for name, place in named(shardings(params, mesh)).items()}

    def read(name: str, shape: tuple[int, ...]) -> Float[Array, "..."]:
        tensor = reader.read(name, shape).astype(np.float32)
        return jax.make_array_from_callback(shape, places[name], tensor.__getitem__) if places else jnp.asarray(tensor)

    return nnx.merge(graph, with_values(params, {name: read(name, leaf.shape) for name, leaf in named(params).items()}))


def save_model(
    folder: Path,
    params: Params,
    config: Qwen2Config,
    *,
    dtype: DTypeLike = jnp.float32,
    max_shard_bytes: int = 4 << 30,
    tokenizer_folder: Path | None = None,
    beside: Mapping[str, Path] | None = None,
) -> None:
    """Write a new folder that transformers and `load_model` read back; atomic.

    Args:
        folder: Where to; must not exist or be empty.
        params: `nnx.state(model, nnx.Param)`.
        config: Architecture of `params`.
        dtype: Stored dtype, f32 or bf16; values are cast on the device.
        max_shard_bytes: Largest safetensors file.
        tokenizer_folder: Folder whose tokenizer files are copied along.
        beside: Other folders to copy into it, by their new names.
    """
    tensors, dtype = named(params), jnp.dtype(dtype)
    with new_folder(Path(folder)) as work:
        write_json(work / "config.json", config.to_hf() | {"torch_dtype": dtype.name})
        sizes = {name: variable.size * dtype.itemsize for name, variable in tensors.items()}
        write_tensors(work, sizes, lambda name: np.asarray(tensors[name][...].astype(dtype)), max_shard_bytes)
        if tokenizer_folder is not None:
            copy_tokenizer(Path(tokenizer_folder), work)
        for name, other in (beside or {}).items():
            shutil.copytree(other, work / name)


def named(params: Params) -> dict[str, Any]:
    """Variables of a parameter tree (values, shapes or shardings) by their Hugging Face names."""
    return {_hf_name(path): variable for path, variable in nnx.to_flat_state(nnx.State(params))}


def with_values(params: Params, values: Mapping[str, Any]) -> Params:
    """A parameter tree of the same structure with the arrays of `values`, by their Hugging Face names."""
    flat = [(path, variable.replace(values[_hf_name(path)])) for path, variable in nnx.to_flat_state(nnx.State(params))]
    return nnx.from_flat_state(flat)


def placed(like: Params, tensors: Mapping[str, np.ndarray]) -> Params:
    """Parameters from tensors on the host by name, with the dtypes and the places of the arrays in `like`."""

    def put(value: Array, tensor: np.ndarray) -> Array:
        return jax.make_array_from_callback(value.shape, value.sharding, tensor.astype(value.dtype).__getitem__)

    return with_values(like, {name: put(variable[...], tensors[name]) for name, variable in named(like).items()})


def _hf_name(path: tuple[Any, ...]) -> str:
    name = ".".join(str(part) for part in path)
    return name if name.startswith("lm_head.") else f"model.{name}"


def _check_names(folder: Path, found: frozenset[str], wanted: Any, config: Qwen2Config) -> None:
    """Refuse tensors the model would ignore, except copies of what it has: a tied head, derived frequencies."""
    spare = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        spare.add("lm_head.weight")
    unknown = sorted(found - spare - set(wanted))
    if unknown:
        raise DataError(f"{folder}: tensor {unknown[0]} is unknown to this architecture ({len(unknown)} such tensors)")
    missing = sorted(set(wanted) - found)
    if missing:
        raise DataError(f"{folder}: tensor {missing[0]} is missing ({len(missing)} such tensors)")
