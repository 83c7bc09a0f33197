import os
import sys

import numpy as np
import pytest

from empo2_jax.errors import ConfigError
from empo2_jax.memory.exact_index import ExactIndex
from empo2_jax.memory.scann_index import ScannIndex, _native_log_filter


def unit(generator, count, dimension=16):
    vectors = generator.standard_normal((count, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_missing_package_is_a_config_error_that_names_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "scann", None)
    with pytest.raises(ConfigError, match=r"memory\.index = 'exact'"):
        ScannIndex(4)


def test_small_memories_fall_back_and_larger_ones_are_certified():
    generator = np.random.default_rng(0)
    index, query = ScannIndex(16, exact_below=32), unit(generator, 1)[0]
    index.add(list(range(31)), unit(generator, 31))
    index.above(query, 0.9)
    assert (index.certified, index.fallbacks) == (0, 1)
    index.add([31], unit(generator, 1))
    index.above(query, 0.9)
    index.nearest(query)
    assert (index.certified, index.fallbacks) == (2, 1)


def test_too_many_hits_cannot_be_certified_and_are_scanned():
    generator = np.random.default_rng(0)
    index, oracle = ScannIndex(16), ExactIndex(16)
    vectors, query = unit(generator, 100), unit(generator, 1)[0]
    for each in (index, oracle):
        each.add(list(range(100)), vectors)
    assert index.above(query, -0.9).tolist() == oracle.above(query, -0.9).tolist()
    assert (index.certified, index.fallbacks) == (0, 1)


def test_tree_is_audited_and_prints_nothing(capfd):
    generator = np.random.default_rng(0)
    index, oracle = ScannIndex(16, tree_above=500, audit_every=1), ExactIndex(16)
    vectors = unit(generator, 1000)
    for each in (index, oracle):
        each.add(list(range(1000)), vectors)
    queries = unit(generator, 40)
    for query in queries:
        assert index.above(query, 0.6).tolist() == oracle.above(query, 0.6).tolist()
        assert index.nearest(query) == oracle.nearest(query)
    assert index.audits == index.certified > 0
    assert index.fallbacks >= 40  # every `nearest` of a tree is a scan
    assert 0 <= index.missed < sum(len(oracle.above(query, 0.6)) for query in queries)
    assert capfd.readouterr() == ("", "")


def test_errors_of_native_code_pass_the_filter(capfd):
    with _native_log_filter():
        os.write(
            2, b"I0000 00:00:1.5 1 a.cc:1] trained\nW0000 00:00:1.5 1 a.cc:1] hm\nE0000 00:00:1.5 1 a.cc:1] broken\n"
        )
    assert capfd.readouterr().err == "E0000 00:00:1.5 1 a.cc:1] broken\n"
