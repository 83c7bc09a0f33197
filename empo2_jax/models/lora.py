"""Low-rank adapters: y = x Wᵀ + b + scale · (x Aᵀ) Bᵀ with W and b frozen (LoRA, arXiv 2106.09685).

A [rank, in] and B [out, rank] lie beside the weight that they change, in its orientation and that of PEFT's files, so
that an adapter folder is a plain copy. B begins as zeros: an adapted model begins as its base. Training applies the
adapter; engines and exported models get weights it is merged into. Not here: dropout, adapted embeddings, several
adapters at a time.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Float, Float32

from empo2_jax.config import LoraConfig
from empo2_jax.models.hf_folder import new_folder, write_file, write_json
from empo2_jax.models.hf_weights import Params, named
from empo2_jax.models.qwen2 import Linear, Qwen2
from empo2_jax.models.sharding import shardings
from empo2_jax.randomness import generator


class LoraLinear(Linear):
    """A linear layer with an adapter; it shares the variables of the layer it stands for."""

    def __init__(self, base: Linear, rank: int, scale: float, random: np.random.Generator):
        self.weight, self.bias, self.scale = base.weight, base.bias, scale
        (out, size), (out_axis, in_axis) = base.weight.shape, base.weight.get_metadata("axes")
        bound = size**-0.5  # Kaiming-uniform with a = √5, as PEFT draws it
        first = random.uniform(-bound, bound, (rank, size)).astype(np.float32)
        self.lora_A = nnx.LoRAParam(jnp.asarray(first), axes=("rank", in_axis))
        self.lora_B = nnx.LoRAParam(jnp.zeros((out, rank), jnp.float32), axes=(out_axis, "rank"))

    def __call__(self, x: Float[Array, "B T in"]) -> Float[Array, "B T out"]:
        """Apply in the dtype of `x`."""
        first, second = (matrix[...].astype(x.dtype).T for matrix in (self.lora_A, self.lora_B))
        change = (x.reshape(-1, x.shape[-1]) @ first) @ second
        return super().__call__(x) + self.scale * change.reshape(*x.shape[:-1], -1)


def adapt(model: Qwen2, config: LoraConfig, seed: int, mesh: Mesh | None = None) -> Qwen2:
    """`model` with new adapters on the targets, or `model` itself where adapters are not enabled.

    The arrays of `model` are shared, not copied, and `model` stays as it is.

    Args:
        model: The base.
        config: Rank, alpha and targets.
        seed: Of A; the values do not depend on the mesh.
        mesh: Where the adapters are placed by `sharding.shardings`; None is the default device.
    """
    if not config.enabled:
        return model
    adapted = nnx.merge(*nnx.split(model))
    for number, block in enumerate(adapted.layers):
        for part in (block.self_attn, block.mlp):
            for target in sorted(set(config.targets) & vars(part).keys()):
                random = generator(seed, "lora", number, target)
                setattr(part, target, LoraLinear(getattr(part, target), config.rank, config.scale, random))
    if mesh is not None:
        adapters = nnx.state(adapted, nnx.LoRAParam)
        # From the host: JAX misplaces an array of a device over processes that have one device each.
        values = jax.tree.map(np.asarray, adapters)
        nnx.update(adapted, jax.device_put(values, shardings(adapters, mesh)))
    return adapted


def split(model: Qwen2) -> tuple[nnx.GraphDef, Any, Any]:
    """Structure, trainable and frozen parameters: adapters and the rest, or everything and nothing without adapters."""
    graphdef, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    return (graphdef, adapters, rest) if adapters else (graphdef, rest, adapters)


def merged(trainable: Params, frozen: Params, scale: float) -> Any:
    """Parameters of the model without adapters, from the two parts of `split`.

    Arrays are new, with the sharding of the weight, where an adapter changes them; all others are shared.
    """
    flat = dict(nnx.to_flat_state(nnx.State(frozen))) | dict(nnx.to_flat_state(nnx.State(trainable)))
    for path in [path for path in flat if path[-1] == "lora_A"]:
        first, second = flat.pop(path), flat.pop((*path[:-1], "lora_B"))
        weight = flat[(*path[:-1], "weight")]
        old = weight[...]
        new = _add(old, first[...], second[...], scale=scale, place=old.sharding)
        flat[(*path[:-1], "weight")] = weight.replace(new)
    return nnx.from_flat_state(flat)


@partial(jax.jit, static_argnames=("scale", "place"))
def _add(
    weight: Float32[Array, "out in"],
    first: Float32[Array, "rank in"],
    second: Float32[Array, "out rank"],
    scale: float,
    place: Sharding,
) -> Float32[Array, "out in"]:
    changed = weight + scale * jnp.matmul(second, first, precision="highest")
    return jax.lax.with_sharding_constraint(changed, place)


def save_adapter(folder: Path, adapters: Params, config: LoraConfig, base: str) -> None:
    """Write a new folder that PEFT reads; atomic.

    Args:
        folder: Where to; must not exist or be empty.
        adapters: The trainable part of `split`.
        config: What they were made from.
        base: Name or folder of the model they belong to.
    """
    tensors = {f"base_model.model.{name}.weight": np.asarray(item[...]) for name, item in named(adapters).items()}
    with new_folder(Path(folder)) as work:
        write_json(work / "adapter_config.json", _peft_config(config, base))
        write_file(work / "adapter_model.safetensors", tensors)


def _peft_config(config: LoraConfig, base: str) -> Mapping[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha % 1 == 0 else config.alpha,
        "target_modules": sorted(set(config.targets)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }
