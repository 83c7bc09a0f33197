"""What holds for every embedder: unit rows, and a vector that depends on its own text only."""

import numpy as np
import pytest

from empo2_jax.memory.hashing_embedder import HashingEmbedder
from tests.fixtures.weights import minilm

TEXTS = ["", "You are in the kitchen.", "open the door to the hallway " * 20, "lamp", "You see a red wire."]


def minilm_real():
    from empo2_jax.memory.minilm_embedder import MiniLMEmbedder

    return MiniLMEmbedder(minilm())


@pytest.fixture(scope="module", params=[HashingEmbedder, minilm_real], ids=["hashing", "minilm"])
def embedder(request):
    return request.param()


def test_rows_have_unit_norm_and_the_stated_dimension(embedder):
    rows = embedder.embed(TEXTS)
    assert rows.shape == (len(TEXTS), embedder.dimension)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-6)
    assert embedder.embed([]).shape == (0, embedder.dimension)


def test_a_vector_does_not_depend_on_the_texts_beside_it(embedder):
    together = embedder.embed(TEXTS)
    reordered = embedder.embed([*reversed(TEXTS), *TEXTS * 2])
    alone = np.concatenate([embedder.embed([text]) for text in TEXTS])
    np.testing.assert_allclose(alone, together, atol=1e-6)
    np.testing.assert_allclose(reordered[: len(TEXTS)][::-1], together, atol=1e-6)


def test_different_texts_differ_and_related_texts_are_nearer(embedder):
    kitchen, similar, other = embedder.embed(
        ["You are in the kitchen. You see a table.", "You are in the kitchen. You see a stove.", "buy cheap red shoes"]
    )
    assert kitchen @ similar > kitchen @ other + 0.2
    assert kitchen @ similar < 0.9999
