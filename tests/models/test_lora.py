"""Adapters against PEFT with PyTorch: the start, logits, gradients, files; merging; what cannot work."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file

from empo2_jax.config import TARGETS, LoraConfig, parse_config
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.models.hf_weights import load_model, named, save_model, weights_hash
from empo2_jax.models.lora import adapt, merged, save_adapter, split
from empo2_jax.models.qwen2 import Qwen2, Qwen2Config

# PEFT asks the model by a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SHAPE = Qwen2Config(
    vocab_size=40,
    hidden_size=16,
    num_layers=11,  # two digits: layers in the order of their numbers, not of their names
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
    max_position_embeddings=32,
    initializer_range=0.1,
)
BASE = Qwen2(SHAPE, rngs=nnx.Rngs(0))
IDS = np.random.default_rng(0).integers(0, 40, (2, 10)).astype(np.int32)
SOME = LoraConfig(enabled=True, rank=2, alpha=5.0, targets=("q_proj", "down_proj"))
ALL = LoraConfig(enabled=True, rank=4, alpha=8)


def logits(model: Qwen2, remat: str = "none") -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(10, dtype=jnp.int32), IDS.shape)
    hidden = model(jnp.asarray(IDS), positions, jnp.ones(IDS.shape, jnp.int32), remat=remat)
    return hidden @ model.head.T


def moved(config: LoraConfig) -> tuple[nnx.GraphDef, Any, Any]:
    """Adapters away from their start: no matrix is zero."""
    graphdef, adapters, base = split(adapt(BASE, config, 3))
    random = np.random.default_rng(1)
    return graphdef, jax.tree.map(lambda leaf: leaf + 0.1 * random.normal(size=leaf.shape), adapters), base


def plain(config: LoraConfig) -> Any:
    """The moved adapters merged."""
    _, adapters, base = moved(config)
    return merged(adapters, base, config.scale)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base as a folder."""
    path = tmp_path_factory.mktemp("base") / "model"
    save_model(path, nnx.split(BASE)[1], SHAPE)
    return path


def torch_model(folder: Path, config: LoraConfig, place: Path) -> peft.PeftModel:
    _, adapters, _ = moved(config)
    save_adapter(place, adapters, config, str(folder))
    base = transformers.Qwen2ForCausalLM.from_pretrained(folder)
    return peft.PeftModel.from_pretrained(base, place, is_trainable=True)


def assert_close(found: Any, expected: Any, rel: float) -> None:
    """Relative to the largest number of the array."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=rel * np.abs(expected).max())


def test_an_adapted_model_begins_as_its_base_bit_for_bit() -> None:
    adapted = adapt(BASE, ALL, 0)
    np.testing.assert_array_equal(jax.jit(logits)(adapted), jax.jit(logits)(BASE))
    _, adapters, base = split(adapted)
    assert all(
        one is other for one, other in zip(jax.tree.leaves(base), jax.tree.leaves(nnx.split(BASE)[1]), strict=True)
    )
    for name, variable in named(adapters).items():
        if name.endswith("lora_B"):
            assert variable.shape[1] == 4 and not np.any(variable[...])
        else:
            assert variable.shape[0] == 4
            bound = variable.shape[1] ** -0.5
            assert 0.8 * bound < np.abs(variable[...]).max() <= bound
    chosen = [np.asarray(variable[...]) for name, variable in named(adapters).items() if name.endswith("q_proj.lora_A")]
    assert len(chosen) == 11 and len({values.tobytes() for values in chosen}) == 11, "every layer has its own draw"
    first, again, other = (jax.tree.leaves(split(adapt(BASE, ALL, seed))[1])[0] for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_adapters_lie_on_the_targets_alone_and_the_base_stays_plain() -> None:
    _, adapters, _ = split(adapt(BASE, SOME, 0))
    found = {name.removeprefix("model.layers.") for name in named(adapters)}
    parts = ("self_attn.q_proj", "mlp.down_proj")
    assert found == {f"{n}.{part}.lora_{side}" for n in range(11) for part in parts for side in "AB"}
    assert split(BASE)[2] == {} and adapt(BASE, LoraConfig(), 0) is BASE
    assert named(split(adapt(BASE, ALL, 0))[1]).keys() == {
        f"model.layers.{n}.{'self_attn' if target in TARGETS[:4] else 'mlp'}.{target}.lora_{side}"
        for n in range(11)
        for target in TARGETS
        for side in "AB"
    }


@pytest.mark.parametrize("config", [SOME, ALL], ids=["some", "all"])
def test_logits_and_gradients_are_those_of_peft(config: LoraConfig, folder: Path, tmp_path: Path) -> None:
    graphdef, adapters, base = moved(config)
    peer = torch_model(folder, config, tmp_path / "adapter")

    def loss(adapters: Any) -> tuple[jax.Array, jax.Array]:
        found = logits(nnx.merge(graphdef, adapters, base), remat="full")
        chosen = jnp.take_along_axis(jax.nn.log_softmax(found[:, :-1]), jnp.asarray(IDS)[:, 1:, None], axis=2)
        return -chosen.mean(), found

    (value, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(adapters)
    ids = torch.tensor(IDS).long()
    answer = peer(ids, labels=ids)
    answer.loss.backward()
    assert_close(found, answer.logits.detach().numpy(), 1e-4)
    assert float(value) == pytest.approx(answer.loss.item(), rel=1e-5)
    theirs = {name: item.grad.numpy() for name, item in peer.named_parameters() if item.requires_grad}
    ours = {f"base_model.model.{name}.default.weight": item[...] for name, item in named(gradient).items()}
    assert ours.keys() == theirs.keys() and len(ours) == 11 * 2 * len(config.targets)
    for name, item in ours.items():
        assert np.abs(theirs[name]).max() > 0
        assert_close(item, theirs[name], 1e-4)


@pytest.mark.parametrize("config", [SOME, ALL], ids=["some", "all"])
def test_merged_weights_are_those_of_peft_and_compute_the_same(
    config: LoraConfig, folder: Path, tmp_path: Path
) -> None:
    graphdef, adapters, base = moved(config)
    whole = merged(adapters, base, config.scale)
    own = jax.jit(logits)(nnx.merge(graphdef, adapters, base))
    assert np.abs(own - jax.jit(logits)(BASE)).max() > 0.1, "the adapter changes something"
    assert_close(jax.jit(logits)(nnx.merge(nnx.split(BASE)[0], whole)), own, 1e-5)
    assert jax.tree.structure(jax.tree.map(np.shape, whole)) == jax.tree.structure(
        jax.tree.map(np.shape, split(BASE)[1])
    )
    theirs = dict(torch_model(folder, config, tmp_path / "adapter").merge_and_unload().named_parameters())
    for name, item in named(whole).items():
        assert_close(item[...], theirs[name].detach().numpy(), 1e-6)
        changed = name.split(".")[-2] in config.targets and name.endswith("weight")
        assert (item[...] is named(base)[name][...]) != changed, "what no adapter changes is not copied"


def test_a_merged_folder_is_read_back_and_a_peft_folder_has_its_names(tmp_path: Path) -> None:
    save_model(tmp_path / "merged", plain(ALL), SHAPE)
    graphdef, adapters, base = moved(ALL)
    found = jax.jit(logits)(load_model(tmp_path / "merged"))
    assert_close(found, jax.jit(logits)(nnx.merge(graphdef, adapters, base)), 1e-5)
    save_adapter(tmp_path / "adapter", adapters, ALL, "Qwen/Qwen2.5-7B")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, "Qwen/Qwen2.5-7B")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 11 * 7 * 2
    assert tensors["base_model.model.model.layers.10.mlp.down_proj.lora_A.weight"].shape == (4, 24)
    assert tensors["base_model.model.model.layers.10.mlp.down_proj.lora_B.weight"].shape == (16, 4)
    with pytest.raises(DataError, match="exists and is not empty"):
        save_adapter(tmp_path / "adapter", adapters, ALL, "")


def test_bf16_compute_is_close_and_its_gradients_are_f32() -> None:
    model = Qwen2(SHAPE, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    _, adapters, base = moved(ALL)
    graphdef = split(adapt(model, ALL, 0))[0]

    def loss(adapters: Any) -> jax.Array:
        return logits(nnx.merge(graphdef, adapters, base)).astype(jnp.float32).var()

    value, gradient = jax.jit(jax.value_and_grad(loss))(adapters)
    assert float(value) == pytest.approx(float(logits(nnx.merge(moved(ALL)[0], adapters, base)).var()), rel=0.1)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {np.dtype(np.float32)}


def test_the_hash_of_weights_sees_values_and_not_files(folder: Path, tmp_path: Path) -> None:
    wanted = weights_hash(folder)
    save_model(tmp_path / "shards", nnx.split(BASE)[1], SHAPE, max_shard_bytes=2000)
    assert weights_hash(tmp_path / "shards") == wanted
    save_model(tmp_path / "rounded", nnx.split(BASE)[1], SHAPE, dtype=jnp.bfloat16)
    other = weights_hash(tmp_path / "rounded")
    save_model(tmp_path / "widened", nnx.split(load_model(tmp_path / "rounded"))[1], SHAPE)
    assert weights_hash(tmp_path / "widened") == other != wanted


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0}, "lora.rank = 0: at least 1 is allowed"),
        ({"alpha": 0}, "lora.alpha = 0: more than 0.0 is allowed"),
        (
            {"targets": ["q_proj", "lm_head"]},
            r"lora.targets\[1\] = 'lm_head': 'q_proj', .* or 'down_proj' is allowed",
        ),
        ({"targets": []}, r"lora.targets = \[\]: a length of at least 1 is allowed"),
    ],
)
def test_each_mistake_is_one_clear_error(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config({"lora": {"enabled": True, **lora}})
    assert "\n" not in str(caught.value)
