import numpy as np

from empo2_jax.memory.exact_index import ExactIndex, best, exact_cosines


def test_matrix_doubles_and_removed_rows_are_filled():
    index = ExactIndex(3, capacity=1)
    axes = np.eye(3, dtype=np.float32)
    index.add([10], axes[:1])
    index.add([11, 12], axes[1:])
    index.remove([10])
    assert index.above(axes[0], 0.5).tolist() == []
    assert [index.nearest(axis) for axis in axes[1:]] == [(11, 1.0), (12, 1.0)]
    ids, vectors = index.items()
    assert sorted(ids) == [11, 12]
    np.testing.assert_array_equal(vectors, index.vectors(ids))


def test_cosine_of_a_row_is_the_same_at_every_position():
    vectors = np.random.default_rng(1).standard_normal((257, 384)).astype(np.float32)
    query = vectors[0]
    whole = exact_cosines(vectors, query)
    alone = np.array([exact_cosines(vectors[i : i + 1], query)[0] for i in range(257)])
    np.testing.assert_array_equal(whole, alone)


def test_best_takes_the_lowest_id_of_the_largest():
    assert best(np.array([5, 2, 9]), np.array([0.5, 0.5, 0.1])) == (2, 0.5)
