"""Round trips through files, against transformers, and every way a folder can be broken."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from empo2_jax.errors import ConfigError, DataError
from empo2_jax.models.hf_weights import load_model, named, save_model
from empo2_jax.models.qwen2 import Qwen2, Qwen2Config
from empo2_jax.models.sharding import make_mesh

CONFIG = Qwen2Config(
    vocab_size=40,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
    max_position_embeddings=32,
)


def params(seed: int = 0) -> nnx.State:
    return nnx.state(Qwen2(CONFIG, rngs=nnx.Rngs(seed)), nnx.Param)


def saved(folder: Path, **options: object) -> Path:
    save_model(folder, params(), CONFIG, **options)
    return folder


def values(tree: nnx.State) -> dict[str, np.ndarray]:
    return {name: np.asarray(variable[...]) for name, variable in named(tree).items()}


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 2000])
def test_save_then_load_is_bit_equal(tmp_path: Path, max_shard_bytes: int) -> None:
    folder = saved(tmp_path / "model", max_shard_bytes=max_shard_bytes)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if max_shard_bytes == 2000:
        assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
        assert len(shards) > 3
    else:
        assert shards == ["model.safetensors"]
    loaded = load_model(folder)
    assert loaded.config == CONFIG
    for name, value in values(nnx.state(loaded, nnx.Param)).items():
        np.testing.assert_array_equal(value, values(params())[name], err_msg=name)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_transformers_reads_what_we_write_and_we_read_what_it_writes(tmp_path: Path) -> None:
    peer = transformers.Qwen2ForCausalLM.from_pretrained(saved(tmp_path / "ours", max_shard_bytes=2000))
    theirs = {name: tensor.detach().numpy() for name, tensor in peer.named_parameters()}
    assert theirs.keys() == values(params()).keys()
    for name, value in values(params()).items():
        np.testing.assert_array_equal(theirs[name], value, err_msg=name)
    peer.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    ids = np.arange(10, dtype=np.int32)[None]
    hidden = model(jnp.asarray(ids), jnp.asarray(ids), jnp.ones((1, 10), jnp.int32))
    with torch.no_grad():
        expected = peer(torch.tensor(ids).long()).logits.numpy()
    np.testing.assert_allclose(hidden @ model.head.T, expected, atol=1e-5)


def test_bf16_files_hold_the_rounded_values(tmp_path: Path) -> None:
    loaded = load_model(saved(tmp_path / "model", dtype=jnp.bfloat16), dtype=jnp.bfloat16)
    assert loaded.dtype == jnp.bfloat16
    for name, value in values(nnx.state(loaded, nnx.Param)).items():
        rounded = np.asarray(jnp.asarray(values(params())[name]).astype(jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_array_equal(value, rounded, err_msg=name)


def test_a_mesh_places_every_parameter(tmp_path: Path) -> None:
    mesh = make_mesh(jax.devices()[:1], 1, 1, 1)
    loaded = load_model(saved(tmp_path / "model"), mesh=mesh)
    state = nnx.state(loaded, nnx.Param)
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(state))
    np.testing.assert_array_equal(loaded.head, named(params())["lm_head.weight"][...])


def test_attention_is_resolved_for_the_devices(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    assert load_model(folder, attention="auto").attention == "xla"
    with pytest.raises(ConfigError, match=r"model\.attention = 'splash' needs a TPU, not cpu"):
        load_model(folder, attention="splash")


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        saved(tmp_path / "model", tokenizer_folder=source)
    assert not (tmp_path / "model").exists()
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": 3}')
    folder = saved(tmp_path / "model", tokenizer_folder=source)
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert (folder / "generation_config.json").exists()


def test_an_occupied_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").touch()
    with pytest.raises(DataError, match="not empty"):
        saved(tmp_path / "model")
    assert (tmp_path / "model" / "precious").exists()


def rewrite(folder: Path, change: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"{NORM} is missing"),
        (lambda tensors: tensors.update({"model.extra": tensors[NORM]}), r"model\.extra is unknown"),
        (
            lambda tensors: tensors.update({NORM: np.ones(3, np.float32)}),
            rf"model\.safetensors: tensor {NORM} .*\(3,\)",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: object, message: str) -> None:
    folder = saved(tmp_path / "model")
    rewrite(folder, change)
    with pytest.raises(DataError, match=message):
        load_model(folder)


def test_a_truncated_or_absent_file_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", max_shard_bytes=2000)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    with pytest.raises(DataError, match=shard.name):
        load_model(folder)
    shard.unlink()
    with pytest.raises(DataError, match=shard.name):
        load_model(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(DataError, match="no weights"):
        load_model(folder)


@pytest.mark.parametrize("file", ["../model/model.safetensors", "/etc/passwd", "a/b", "..", "", 3, ["x"]])
def test_an_index_names_files_beside_it_and_nothing_else(file: object, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": file}}), encoding="utf-8")
    with pytest.raises(
        DataError,
        match=r"weight_map\.model\.norm\.weight = .*: (the name of a file beside it|text) is ",
    ):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": [file]}), encoding="utf-8")
    with pytest.raises(DataError, match=r"weight_map = \[.*\]: a table of keys and values is allowed"):
        load_model(folder)


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match="hidden_act"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json: not JSON"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"config\.json: cannot be read: No such file"):
        load_model(folder)
