"""Parity with transformers' BertModel on a small random encoder, and on the real weights where they can be had."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel

from empo2_jax.errors import DataError
from empo2_jax.memory.minilm_embedder import MiniLMEmbedder
from tests.fixtures.weights import minilm

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{n}" for n in range(40))]
TEXTS = ["", "w0 w1 w2", " ".join(f"w{n % 40}" for n in range(23)), "w5 unknown", " ".join(["w7", "w9"] * 90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    BertModel(config).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def reference(path, texts, window):
    """Unit-norm mean of the last hidden states, one text at a time, without padding."""
    model = BertModel.from_pretrained(path).eval()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(window)
    rows = []
    with torch.no_grad():
        for text in texts:
            hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].mean(0)
            rows.append((hidden / hidden.norm()).numpy())
    return np.stack(rows)


def test_parity_with_transformers_on_a_random_encoder(folder):
    embedder = MiniLMEmbedder(folder)
    assert embedder.dimension == 24
    np.testing.assert_allclose(embedder.embed(TEXTS), reference(folder, TEXTS, 64), atol=1e-5)


def test_vectors_do_not_depend_on_batch_or_order(folder):
    embedder = MiniLMEmbedder(folder, batch=4)
    together = embedder.embed(TEXTS * 3)
    alone = np.concatenate([embedder.embed([text]) for text in TEXTS])
    np.testing.assert_allclose(together, np.tile(alone, (3, 1)), atol=1e-6)


def test_parity_on_the_real_weights():
    path = minilm()
    texts = ["You are in the kitchen. You see a stove, a sink and a table.", "hallway " * 300]
    np.testing.assert_allclose(MiniLMEmbedder(path).embed(texts), reference(path, texts, 256), atol=1e-5)


def test_folders_that_are_no_encoder_are_data_errors(folder, tmp_path):
    with pytest.raises(DataError, match="no sentence-encoder folder"):
        MiniLMEmbedder(tmp_path)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(DataError, match="hidden_act = 'relu': 'gelu' is allowed"):
        MiniLMEmbedder(tmp_path)
