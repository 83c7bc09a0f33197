import numpy as np

from empo2_jax.memory.hashing_embedder import HashingEmbedder


def test_one_word_is_one_signed_axis_and_case_is_ignored():
    lower, upper = HashingEmbedder(64).embed(["lamp", "Lamp!"])
    np.testing.assert_array_equal(lower, upper)
    assert np.count_nonzero(lower) == 1
    assert abs(lower).max() == 1.0


def test_cosine_counts_shared_words_and_pairs():
    # {a, b, "a b"} and {a, c, "a c"} share one of three features (no collision at this size).
    left, right = HashingEmbedder(4096).embed(["a b", "a c"])
    np.testing.assert_allclose(left @ right, 1 / 3, atol=1e-6)


def test_word_order_matters_through_pairs():
    left, right = HashingEmbedder(4096).embed(["red green", "green red"])
    np.testing.assert_allclose(left @ right, 2 / 3, atol=1e-6)


def test_text_without_words_is_the_first_axis():
    np.testing.assert_array_equal(HashingEmbedder(3).embed(["", "?!"]), [[1, 0, 0], [1, 0, 0]])
