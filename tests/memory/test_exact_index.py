import numpy as np
import pytest

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


@pytest.mark.parametrize("best_at_the_top", [True, False])
def test_a_reader_who_stops_early_scans_only_the_blocks_it_needs(best_at_the_top):
    index = ExactIndex(2)
    size, hit, miss = 5000, np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    vectors = np.tile(miss, (size, 1))
    vectors[7] = hit
    scores = np.zeros(size)
    scores[7] = 1.0 if best_at_the_top else -1.0
    index.add(list(range(size)), vectors, scores.tolist())
    found = index.best_first(hit, 0.5)
    assert next(found) == 7
    assert found.gi_frame.f_locals["start"] == (0 if best_at_the_top else 3840)  # 256 + 512 + 1024 + 2048
    assert list(found) == []
    index.remove([7])
    assert list(index.best_first(hit, 0.5)) == []


def test_best_first_is_strict_at_the_threshold_inside_the_rounding_margin():
    index = ExactIndex(4)
    query = np.array([1, 0, 0, 0], np.float32)
    index.add([1, 2, 3], np.stack([np.full(4, 0.5), [0.50001, 0.5, 0.5, 0.5], [0.49999, 0.5, 0.5, 0.5]]).astype("f4"))
    assert list(index.best_first(query, 0.5)) == [2]
