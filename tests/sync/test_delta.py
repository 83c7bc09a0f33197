"""A chain of deltas gives the bytes that were published; a missing or wrong link is refused by name."""

import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2_jax.errors import SyncError
from empo2_jax.models.hf_weights import placed
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.tensor_names import tensor_shapes
from empo2_jax.rollout.base import Request, Sampling
from empo2_jax.rollout.jax_engine import JaxEngine
from empo2_jax.sync.bundle import read_bundle
from empo2_jax.sync.delta import MASK, VALUES, WHOLE, Receiver, apply_delta, decode, encode
from empo2_jax.sync.manifest import read_manifest
from empo2_jax.sync.orbax_publish import Publisher
from empo2_jax.sync.tensor_file import Tensor, raw
from tests.fixtures.published import CONFIG, bf16, nudged, params

TREE = params()
BITS = {"bfloat16": (ml_dtypes.bfloat16, np.uint16), "float32": (np.float32, np.uint32)}


@given(
    dtype=st.sampled_from(sorted(BITS)),
    shape=st.sampled_from([(1,), (7,), (8, 3), (40, 50), (0, 4)]),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_decode_inverts_encode_for_any_bits(dtype: str, shape: tuple[int, ...], share: float, seed: int) -> None:
    kind, word = BITS[dtype]
    random = np.random.default_rng(seed)  # NaNs, infinities and signed zeros are among the bits
    old = random.integers(0, np.iinfo(word).max, shape, word, endpoint=True)
    new = old ^ np.where(random.random(shape) < share, random.integers(0, np.iinfo(word).max, shape, word), 0).astype(
        word
    )
    parts = encode("x", old.view(kind), new.view(kind))
    out = decode("x", old.view(kind), parts)
    assert (out.dtype, out.shape) == (np.dtype(kind), shape)
    np.testing.assert_array_equal(raw(out), raw(new))
    assert bool(parts) == bool((old != new).any())
    assert sum(part.nbytes for part in parts.values()) <= new.nbytes


def test_small_changes_are_small_and_random_ones_are_stored_whole() -> None:
    random = np.random.default_rng(0)
    old = random.normal(size=(400, 500)).astype(ml_dtypes.bfloat16)
    moved = raw(old).view(np.uint16).copy()
    moved[random.random(moved.size) < 0.023] ^= 1
    parts = encode("x", old, moved.view(ml_dtypes.bfloat16).reshape(old.shape))
    assert parts.keys() == {"x" + MASK, "x" + VALUES}
    assert old.nbytes > 20 * sum(part.nbytes for part in parts.values())
    other = random.integers(0, 2**16, old.shape, np.uint16).view(ml_dtypes.bfloat16)
    assert encode("x", old, other).keys() == {"x" + WHOLE}


@pytest.mark.parametrize("damage", [b"", b"garbage"])
def test_parts_that_do_not_fit_are_an_error(damage: bytes) -> None:
    old = np.zeros(100, np.float32)
    new = old.copy()
    new[3] = 1
    parts = encode("x", old, new) | {"x" + VALUES: np.frombuffer(damage, np.uint8)}
    with pytest.raises(SyncError, match="delta of tensor x cannot be decoded"):
        decode("x", old, parts)
    del parts["x" + VALUES]
    with pytest.raises(SyncError, match="delta of tensor x cannot be decoded"):
        decode("x", old, parts)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 in full, 2 to 4 as deltas."""
    root = tmp_path_factory.mktemp("chain")
    with Publisher(root, CONFIG, orbax=False, durable=False, full_every=9) as publisher:
        for version in (1, 2, 3, 4):
            publisher.publish(tree(version), version)
    return root


@pytest.fixture
def root(chain: Path, tmp_path: Path) -> Path:
    return shutil.copytree(chain, tmp_path / "root")


def tree(version: int) -> Any:
    return nudged(TREE, 1 + (version - 1) / 4096)


def assert_is(version: int, tensors: dict[str, Tensor]) -> None:
    assert list(tensors) == list(tensor_shapes(CONFIG))
    for name, value in bf16(tree(version)).items():
        np.testing.assert_array_equal(raw(tensors[name]), raw(value), err_msg=name)


def test_from_nothing_and_from_what_is_held(root: Path) -> None:
    receiver = Receiver(root, CONFIG)
    assert_is(2, receiver.follow(2))
    shutil.rmtree(root / "1")
    shutil.rmtree(root / "2")  # held: its files are not needed
    assert_is(4, receiver.follow())
    assert receiver.version == 4
    assert receiver.follow() is receiver.tensors


def test_back_to_an_older_version(root: Path) -> None:
    receiver = Receiver(root, CONFIG)
    receiver.follow(4)
    assert_is(2, receiver.follow(2))


def test_an_engine_that_follows_serves_what_was_published(root: Path) -> None:
    receiver, wanted = (
        Receiver(root, CONFIG),
        jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), tree(3)),
    )
    engine = JaxEngine(Qwen2(CONFIG, rngs=nnx.Rngs(7)), slots=1, max_length=24)
    request = Request(
        "s",
        np.arange(5, dtype=np.int32),
        np.array([1, 2], np.uint32),
        Sampling(max_tokens=12, temperature=1.0, stop_ids=()),
    )
    found, expected = (
        (engine.load(weights, 3), engine.generate([request])[0])[1]
        for weights in (placed(TREE, receiver.follow(3)), wanted)
    )
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
    assert found.policy_version == 3


@pytest.mark.parametrize(("link", "child"), [(1, 2), (2, 3), (3, 4)])
def test_a_missing_link_is_named(root: Path, link: int, child: int) -> None:
    shutil.rmtree(root / str(link))
    with pytest.raises(SyncError) as caught:
        Receiver(root, CONFIG).follow(4)
    assert str(caught.value) == f"{root / str(link)}: no such version; version {child} is a delta on it"


def test_no_version_at_all(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match="no version is published"):
        Receiver(tmp_path, CONFIG).follow()
    with pytest.raises(SyncError, match=r"/3: no such version$"):
        Receiver(tmp_path, CONFIG).follow(3)


def test_a_link_of_another_history_is_refused(root: Path, tmp_path: Path) -> None:
    with Publisher(tmp_path / "other", CONFIG, orbax=False, durable=False) as publisher:
        for version in (1, 2):
            folder = publisher.publish(nudged(TREE, 2.0 * version), version).wait()
    shutil.rmtree(root / "2")
    shutil.copytree(folder, root / "2")
    with pytest.raises(SyncError, match="/2: not the version 2 that the delta 3 was made from"):
        Receiver(root, CONFIG).follow(3)
    held = {name: value for name, value in bf16(tree(2)).items()}
    with pytest.raises(SyncError, match=r"/3: needs version 2 \(\w{8}\); there is version 2"):
        apply_delta(held, 2, read_manifest(folder).seal, read_bundle(root / "3", CONFIG))
    with pytest.raises(SyncError, match=r"/2: is not a delta; there is version 1"):
        apply_delta(held, 1, "x" * 64, read_bundle(folder, CONFIG))


def test_a_damaged_delta_is_refused_and_what_is_held_stays(root: Path) -> None:
    receiver = Receiver(root, CONFIG)
    receiver.follow(2)
    path = sorted((root / "3").glob("delta-*"))[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(SyncError, match=rf"{path.name}: checksum does not match"):
        receiver.follow(4)
    assert receiver.version == 2
    assert_is(2, receiver.tensors)


def test_a_start_that_was_changed_in_memory_does_not_pass(root: Path) -> None:
    receiver = Receiver(root, CONFIG)
    receiver.follow(2)
    receiver.tensors["lm_head.weight"] = receiver.tensors["lm_head.weight"] * 2
    with pytest.raises(SyncError, match=r"tensor lm_head\.weight does not come out as published"):
        receiver.follow(3)


@settings(max_examples=5)
@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))
def test_any_walk_through_the_versions_gives_their_bytes(chain: Path, walk: list[int]) -> None:
    receiver = Receiver(chain, CONFIG)
    for version in walk:
        assert_is(version, receiver.follow(version))
