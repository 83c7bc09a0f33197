"""Well-formed JSON in a model folder that is no model: the file and the key are named before anything is computed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from empo2_jax.assets import toy_start
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.models.hf_folder import TensorReader
from empo2_jax.models.qwen2_config import read_config
from empo2_jax.models.tokenizer import Tokenizer

DEEP = b"[" * 100_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_start(), tmp_path / "policy"))


def change(path: Path, values: dict[str, Any]) -> None:
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(before | values), encoding="utf-8")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rope_theta": "x"}, "rope_theta = 'x': a number is allowed"),
        ({"rope_theta": 1}, "rope_theta = 1: more than 1.0 is allowed"),
        ({"rope_scaling": [1]}, "rope_scaling = [1]: a table of keys and values is allowed"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling.rope_type = ['yarn']: 'default', 'linear', "),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor = '2': a number is allowed"),
        ({"rope_scaling": {"type": "llama3", "factor": 2, "high_freq_factor": 1}}, "low_freq_factor = 1.0: less than"),
        ({"rope_parameters": 5}, "rope_parameters = 5: a table of keys and values is allowed"),
        ({"head_dim": -4}, "head_dim = -4: at least 1 is allowed"),
        ({"head_dim": 3}, "head_dim 3: rotary embeddings need an even one from 2 to 65536"),
        ({"hidden_size": 1, "head_dim": None}, "head_dim 0: rotary embeddings need an even one from 2 to 65536"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: a finite number is allowed"),
        ({"max_position_embeddings": 0}, "max_position_embeddings = 0: at least 1 is allowed"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0: at least 1 is allowed"),
        ({"num_key_value_heads": [2]}, "num_key_value_heads = [2]: a whole number is allowed"),
        ({"vocab_size": 10**30}, "vocab_size = 1000000000000000000000000000000: less than 2147483648 is allowed"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: at most 10000 is allowed"),
        ({"tie_word_embeddings": "x"}, "tie_word_embeddings = 'x': true or false is allowed"),
        ({"model_type": ["qwen2"]}, "model_type = ['qwen2']: 'qwen2' or 'llama' is allowed"),
        ({"quantization_config": {}}, "quantization_config = {}: nothing is allowed"),
    ],
)
def test_a_configuration_that_is_no_model_names_its_key(folder: Path, values: dict[str, Any], said: str) -> None:
    change(folder / "config.json", values)
    with pytest.raises(ConfigError) as caught:
        read_config(folder)
    assert str(caught.value).startswith(f"{folder / 'config.json'}: {said}")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (
            "tokenizer_config.json",
            {"chat_template": "{% if %}"},
            "chat template: TemplateSyntaxError: ",
        ),
        (
            "tokenizer_config.json",
            {"chat_template": "{{ 1 / 0 }}"},
            "chat template: ZeroDivisionError: division",
        ),
        ("tokenizer_config.json", {"chat_template": "{{ messages[9].x.y }}"}, "chat template: UndefinedError: "),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template = 5: text is allowed"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "text is allowed"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token = 5: text is allowed"),
        ("tokenizer_config.json", {"bos_token": {"content": [1]}}, "text is allowed"),
        ("tokenizer_config.json", DEEP, "not JSON: recursion limit exceeded"),
        ("tokenizer.json", DEEP, "not JSON: recursion limit exceeded"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id[0] = 'x': a whole number is allowed"),
        ("generation_config.json", {"eos_token_id": [0, -5]}, "eos_token_id[1] = -5: at least 0 is allowed"),
        ("config.json", {"eos_token_id": {"a": 1}}, "eos_token_id[0] = {'a': 1}: a whole number is allowed"),
        ("chat_template.jinja", b"\xff\xfe", "not UTF-8: invalid start byte at byte 0"),
        ("chat_template.jinja", b"{% if %}", "chat template: TemplateSyntaxError: "),
    ],
)
def test_a_tokenizer_that_cannot_be_used_names_its_file(
    folder: Path, file: str, content: dict[str, Any] | bytes, said: str
) -> None:
    if isinstance(content, bytes):
        (folder / file).write_bytes(content)
    else:
        change(folder / file, content)
    with pytest.raises(DataError) as caught:
        Tokenizer.load(folder)
    assert str(caught.value).startswith(str(folder)) and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_named_templates_and_stop_ids_may_be_lists(folder: Path) -> None:
    plain = Tokenizer.load(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = [{"name": "tool", "template": "{% if %}"}, {"name": "default", "template": settings["chat_template"]}]
    token = {"content": settings["eos_token"], "lstrip": False}
    change(folder / "tokenizer_config.json", {"chat_template": named, "eos_token": token, "bos_token": None})
    change(folder / "generation_config.json", {"eos_token_id": [plain.stop_ids[0], None]})
    assert Tokenizer.load(folder).stop_ids == plain.stop_ids


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"weight_map": [1]}', "weight_map = [1]: a table of keys and values is allowed"),
        (b'{"weight_map": {"a": 5}}', "weight_map.a = 5: text is allowed"),
        (b"{}", "weight_map is missing"),
        (DEEP, "not JSON: recursion limit exceeded"),
    ],
)
def test_an_index_that_is_none_is_named(folder: Path, content: bytes, said: str) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        TensorReader(folder)
    assert str(caught.value).startswith(f"{path}: {said}")


def test_a_shard_that_is_no_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    (folder / "b").mkdir()
    with pytest.raises(DataError, match=f"{folder}/b: truncated or not a safetensors file: "):
        TensorReader(folder).check_files()
