"""Every index gives the answers of a plain loop, after any history of insertions and removals."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2_jax.memory.exact_index import ExactIndex
from empo2_jax.memory.scann_index import ScannIndex

DIMENSION = 12


def scann_always(dimension):
    return ScannIndex(dimension, exact_below=1)


def scann_tree_always_audited(dimension):
    return ScannIndex(dimension, exact_below=1, tree_above=4, audit_every=1)


FACTORIES = [ExactIndex, ScannIndex, scann_always, scann_tree_always_audited]


def clustered(generator, count, dimension=DIMENSION):
    """Unit vectors around a few centers, so that thresholds split them and ties occur."""
    centers = np.eye(dimension, dtype=np.float32)[generator.integers(0, 3, count)]
    vectors = centers + generator.choice([0.0, 0.4], (count, 1)) * generator.standard_normal((count, dimension))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def brute_cosines(entries, query):
    return {item: float(np.dot(v.astype(np.float64), query.astype(np.float64))) for item, v in entries.items()}


@pytest.mark.parametrize("factory", FACTORIES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_index_equals_a_plain_loop_under_random_histories(factory, seed, data):
    generator = np.random.default_rng(seed)
    index, entries, scores, next_id = factory(DIMENSION), {}, {}, 0
    for _ in range(data.draw(st.integers(1, 5))):
        count = data.draw(st.integers(0, 60))
        vectors = clustered(generator, count)
        new, given = range(next_id, next_id + count), generator.integers(0, 4, count).astype(float).tolist()
        index.add(list(new), vectors, given)
        entries.update(zip(new, vectors, strict=True))
        scores.update(zip(new, given, strict=True))
        next_id += count
        gone = [int(i) for i in generator.permutation(sorted(entries))[: data.draw(st.integers(0, len(entries)))]]
        index.remove(gone)
        for item in gone:
            del entries[item]
        for query in clustered(generator, 3):
            cosines = brute_cosines(entries, query)
            close = any(abs(value - 0.5) < 1e-9 for value in cosines.values())
            if not close:
                expected = sorted(i for i, value in cosines.items() if value > 0.5)
                assert index.above(query, 0.5).tolist() == expected
                ranked = sorted(expected, key=lambda i: (-scores[i], -i))
                assert list(index.best_first(query, 0.5)) == ranked
                assert list(islice(index.best_first(query, 0.5), 2)) == ranked[:2]
            item, cosine = index.nearest(query)
            assert len(index) == len(entries)
            if entries:
                top = max(cosines.values())
                assert cosine == pytest.approx(top, abs=1e-12)
                assert item == min(i for i, value in cosines.items() if value >= top - 1e-12)
            else:
                assert (item, cosine) == (-1, -np.inf)


@pytest.mark.parametrize("factory", FACTORIES)
def test_threshold_is_strict_and_ties_give_the_lowest_id(factory):
    index = factory(4)
    half = np.array([0.5, 0.5, 0.5, 0.5], np.float32)
    axis = np.array([1, 0, 0, 0], np.float32)
    index.add([7, 3], np.stack([half, half]))
    assert index.above(axis, 0.5).tolist() == []
    assert index.above(axis, np.nextafter(0.5, 0)).tolist() == [3, 7]
    assert index.nearest(axis) == (3, 0.5)


@pytest.mark.parametrize("factory", FACTORIES)
def test_known_ids_are_refused_and_unknown_ids_are_errors(factory):
    index = factory(2)
    index.add([1], np.array([[1, 0]], np.float32))
    with pytest.raises(ValueError, match="must be new"):
        index.add([2, 1], np.eye(2, dtype=np.float32))
    assert len(index) == 1
    with pytest.raises(KeyError):
        index.remove([5])


@pytest.mark.parametrize("factory", FACTORIES)
def test_answers_do_not_depend_on_the_history(factory):
    generator = np.random.default_rng(0)
    vectors, query = clustered(generator, 50), clustered(generator, 1)[0]
    straight, winding = factory(DIMENSION), factory(DIMENSION)
    straight.add(list(range(40)), vectors[:40])
    for item in reversed(range(50)):
        winding.add([item], vectors[item : item + 1])
    winding.remove(list(range(40, 50)))
    assert straight.above(query, 0.3).tolist() == winding.above(query, 0.3).tolist()
    assert straight.nearest(query) == winding.nearest(query)
