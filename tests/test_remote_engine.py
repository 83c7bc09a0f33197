"""What the trainer hands to rollout servers: versions as folders, its own log-probs of the canary, keys and URLs."""

from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoModelForCausalLM

from empo2_jax.config import Config, parse_config
from empo2_jax.errors import ConfigError
from empo2_jax.models.qwen2 import Qwen2, Qwen2Config
from empo2_jax.models.sharding import make_mesh
from empo2_jax.remote_engine import (
    CANARY_IDS,
    PublishedWeights,
    canary_ids,
    canary_scorer,
    make_remote_engine,
    server_urls,
)
from empo2_jax.sync.bundle import read_bundle
from empo2_jax.sync.manifest import versions
from tests.fixtures.worlds import word_tokenizer, word_tokenizer_folder


@pytest.fixture(scope="module")
def model() -> Qwen2:
    config = Qwen2Config(word_tokenizer().size, 16, 2, 2, 1, 8, 32, initializer_range=0.3)
    return Qwen2(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_tokenizer_folder(tmp_path_factory.mktemp("tokens"))


def params_of(model: Qwen2):
    return nnx.split(model)[1]


def test_urls_from_the_configuration_or_a_file(tmp_path: Path) -> None:
    urls = ("http://127.0.0.1:1", "https://host:2")
    assert server_urls(urls) == list(urls)
    path = tmp_path / "servers.txt"
    path.write_text("http://127.0.0.1:1\n\n https://host:2 \n", encoding="utf-8")
    assert server_urls((str(path),)) == list(urls)
    for wrong, message in (
        (("nowhere.txt",), "neither a URL nor a file"),
        (("ftp://x",), "'ftp://x'; http:// or https://"),
        ((urls[0], urls[0]), "occurs twice"),
        ((str(tmp_path / "empty"),), "'nothing'; http://"),
        ((str(tmp_path / "key"),), "no user and key in a URL"),
    ):
        (tmp_path / "empty").write_text("\n", encoding="utf-8")
        (tmp_path / "key").write_text("http://me:s3cret@host:1\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            server_urls(wrong)


def test_a_published_version_is_what_transformers_reads_and_scores_alike(
    model: Qwen2, tokens: Path, tmp_path: Path
) -> None:
    params, mesh = params_of(model), make_mesh(jax.devices(), 1, 1, 1)
    with closing(PublishedWeights(tmp_path, model.config, dtype="float32", tokenizer_folder=tokens)) as publish:
        folder = publish(params, 3)
    assert folder == tmp_path / "3" and (folder / "tokenizer.json").is_file()
    ids = canary_ids(word_tokenizer())
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(ids)[None].long()).logits[0, :-1].log_softmax(-1)
    expected = logits[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:]).long()].numpy()
    np.testing.assert_allclose(canary_scorer(Config(), model, mesh, ids)(params), expected, atol=1e-5)


def test_a_run_that_went_back_publishes_its_versions_anew(model: Qwen2, tokens: Path, tmp_path: Path) -> None:
    params = params_of(model)
    with closing(PublishedWeights(tmp_path, model.config, dtype="float32", tokenizer_folder=tokens)) as publish:
        for version in (1, 2, 3, 4):
            publish(params, version)
        assert versions(tmp_path) == [2, 3, 4]
        publish(jax.tree.map(lambda leaf: leaf + 1, params), 3)
    assert versions(tmp_path) == [2, 3]
    np.testing.assert_array_equal(
        read_bundle(tmp_path / "3", model.config).read("model.norm.weight"), np.asarray(model.norm.weight[...]) + 1
    )


def test_a_closed_vocabulary_has_a_canary_of_all_its_words() -> None:
    ids = canary_ids(word_tokenizer())
    assert len(ids) == CANARY_IDS and len(set(ids.tolist())) > CANARY_IDS // 2 and ids.max() < word_tokenizer().size - 1


def test_a_canary_under_bf16_weights_is_scored_under_rounded_ones(model: Qwen2) -> None:
    mesh, ids, params = make_mesh(jax.devices(), 1, 1, 1), canary_ids(word_tokenizer()), params_of(model)
    config = parse_config({"rollout": {"weights_dtype": "bfloat16"}})
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), params)
    np.testing.assert_array_equal(
        canary_scorer(config, model, mesh, ids)(params), canary_scorer(Config(), model, mesh, ids)(rounded)
    )
    assert config.canary_tolerance == 5e-2 and Config().canary_tolerance == 1e-4


def test_keys_come_from_the_environment_and_stay_out_of_sight(
    model: Qwen2, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "top secret")
    config = parse_config(
        {
            "run": {"dir": str(tmp_path)},
            "rollout": {"engine": "sglang", "servers": ["http://127.0.0.1:9"], "api_key_env": "MY_KEY"},
        }
    )
    mesh = make_mesh(jax.devices(), 1, 1, 1)
    engine = make_remote_engine(config, model, word_tokenizer(), tokens, mesh, 100)
    assert engine._access.api_key == "top secret" and engine._access.admin_key == ""
    with pytest.raises(ConfigError, match="no \\*, \\? and \\[ is allowed"):
        strange = config.rollout.model_copy(update={"weights_dir": str(tmp_path / "run[1]")})
        make_remote_engine(config.model_copy(update={"rollout": strange}), model, word_tokenizer(), tokens, mesh, 100)
    assert "secret" not in repr(engine._access) and "$MY_KEY" in engine._access.api_key_name
    engine.close()
