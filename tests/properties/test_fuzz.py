"""Readers of what others wrote, given arbitrary and nearly valid content: the documented error, or a value."""

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from empo2_jax.config import Config, parse_config
from empo2_jax.config_file import dump_toml, load_config
from empo2_jax.envs.webshop.product import RawAttributes, RawInstruction, RawProduct
from empo2_jax.envs.webshop.records import items, members
from empo2_jax.errors import ConfigError, DataError, Empo2Error, EngineError, SyncError
from empo2_jax.models.hf_folder import TensorReader
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.readers import shaped
from empo2_jax.recorded_updates import read_updates
from empo2_jax.rollout.batching import Batcher
from empo2_jax.rollout.http_api import Limits, Served, make_app
from empo2_jax.rollout.wire import Model, parse_generate
from empo2_jax.sync.manifest import FileEntry, Manifest, TensorEntry, read_manifest
from tests.fixtures.fuzz import JSON, TEXT, damaged

SECTIONS = {name: list(field.annotation.model_fields) for name, field in Config.model_fields.items()}
KEYS = st.sampled_from([(section, key) for section, keys in SECTIONS.items() for key in keys])
TOML = dump_toml(parse_config({})).encode()
TENSORS = save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(4, np.float32)})
MODEL = Model(vocab_size=40, token_count=38, max_length=64, stop_ids=(1,))
NAMES = ["input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "sampling_key", "stream", "text"]
BODY = st.dictionaries(st.sampled_from(NAMES), JSON | st.lists(st.integers(-2, 45), max_size=4), max_size=5)
PRODUCT = {"asin": "B000000001", "name": "a lamp", "pricing": "$3.50", "customization_options": {"color": []}}


def one_line(error: Empo2Error) -> bool:
    return 0 < len(" ".join(str(error).split())) < 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A new empty folder at every call."""
    root, numbers = tmp_path_factory.mktemp("fuzz"), count()

    def new() -> Path:
        path = root / str(next(numbers))
        path.mkdir()
        return path

    return new


@given(st.lists(st.tuples(KEYS, JSON), max_size=3))
def test_values_of_a_configuration(pairs: list[tuple[tuple[str, str], Any]]) -> None:
    values: dict[str, Any] = {}
    for (section, key), value in pairs:
        values.setdefault(section, {})[key] = value
    try:
        assert isinstance(parse_config(values), Config)
    except ConfigError as error:
        assert one_line(error)


@given(JSON.filter(lambda value: isinstance(value, dict)))
def test_any_mapping_as_a_configuration(value: dict[str, Any]) -> None:
    try:
        assert parse_config(value) == parse_config({})  # only {} and empty sections are valid by chance
    except ConfigError as error:
        assert one_line(error)


@given(content=damaged(TOML) | st.binary(max_size=40))
def test_configuration_files(folder: Any, content: bytes) -> None:
    path = folder() / "config.toml"
    path.write_bytes(content)
    try:
        assert isinstance(load_config(path), Config)
    except ConfigError as error:
        assert one_line(error)


@given(content=damaged(TENSORS) | st.binary(max_size=64))
def test_safetensors(folder: Any, content: bytes) -> None:
    place = folder()
    (place / "model.safetensors").write_bytes(content)
    try:
        reader = TensorReader(place)
        for name, shape in (("a", (2, 3)), ("b", (4,))):
            assert reader.read(name, shape).shape == shape
    except DataError as error:
        assert one_line(error)


@given(value=JSON)
def test_index_of_safetensors(folder: Any, value: Any) -> None:
    place = folder()
    (place / "model.safetensors.index.json").write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(DataError):
        TensorReader(place).read("a", (2, 3))


@given(
    values=st.dictionaries(st.sampled_from(["model_type", "hidden_size", "num_hidden_layers", "rope_scaling"]), JSON)
)
def test_configuration_of_a_model(values: dict[str, Any]) -> None:
    try:
        assert isinstance(Qwen2Config.from_hf(values), Qwen2Config)
    except Empo2Error as error:
        assert one_line(error)


def manifest_bytes(folder: Path) -> bytes:
    tensors = {"b": TensorEntry("model.safetensors", (2, 3), "1")}
    Manifest(4, None, "full", "bfloat16", tensors, {"model.safetensors": FileEntry(100, "3")}).write(folder)
    return (folder / "manifest.json").read_bytes()


@given(data=st.data())
def test_manifests_of_published_weights(folder: Any, data: st.DataObject) -> None:
    place = folder()
    whole = manifest_bytes(place)
    content = data.draw(damaged(whole) | JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
    (place / "manifest.json").write_bytes(content)
    try:
        found = read_manifest(place)
    except SyncError as error:
        assert one_line(error)
    else:  # white space, or a key that is not read
        assert json.loads(content).items() >= json.loads(whole).items() and found.version == 4


@given(content=damaged(json.dumps([PRODUCT, PRODUCT]).encode()) | JSON.map(lambda value: json.dumps(value).encode()))
def test_catalogue_files(folder: Any, content: bytes) -> None:
    path = folder() / "items.json"
    path.write_bytes(content)
    for read in (items, members):
        try:
            for record in read(path):
                value = record[1] if read is members else record
                for kind in (RawProduct, RawAttributes, RawInstruction):
                    try:
                        assert isinstance(shaped(value, kind, "record"), kind)
                    except DataError as error:
                        assert one_line(error)
        except DataError as error:
            assert one_line(error)


@given(content=st.binary(max_size=80))
def test_recorded_updates(folder: Any, content: bytes) -> None:
    place = folder()
    (place / "updates").mkdir()
    (place / "updates/1.npz").write_bytes(content)
    with pytest.raises(DataError):
        read_updates(place, 1)


@given(BODY)
@settings(max_examples=100)
def test_bodies_of_requests(body: dict[str, Any]) -> None:
    try:
        asked, _ = parse_generate(json.dumps(body).encode(), MODEL, lambda: ("rid", (1, 2)))
    except EngineError as error:
        assert one_line(error)
    else:
        assert all(0 <= token < MODEL.vocab_size for job in asked for token in job.job.request.prompt_ids)


class RefusingEngine:
    """Takes no request: what is asked of it does not matter here."""

    policy_version, max_length, free_slots = 0, 64, 2

    def check(self, request: Any) -> None:
        raise EngineError("not now")

    def admit(self, jobs: Any) -> None:
        raise AssertionError("it was refused")

    def decode(self, burst: int | None = None) -> None: ...

    def withdraw(self, job: Any) -> None: ...

    def flush(self) -> None: ...

    def load(self, params: Any, policy_version: int) -> None: ...

    def release_memory(self, parts: Any) -> None: ...


def refuse(place: str) -> Any:
    raise DataError(f"{place}: not a model")


PATHS = [
    "/generate",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/weights_checker",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/no",
]


@given(st.lists(st.tuples(st.sampled_from(PATHS), BODY.map(json.dumps) | JSON.map(json.dumps) | TEXT), max_size=6))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_no_request_is_the_servers_fault(requests: list[tuple[str, str]]) -> None:
    batcher = Batcher(RefusingEngine(), burst=4)
    served = Served(batcher, MODEL, str, refuse, refuse, dict, {}, {}, Limits(waiting=3, body_bytes=2000))

    async def run() -> None:
        transport = httpx.ASGITransport(make_app(served, None))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path, body in requests:
                response = await client.post(path, content=body.encode())
                assert response.status_code < 500, (path, body, response.text)

    try:
        asyncio.run(run())
    finally:
        batcher.close(0.0)
        batcher.join(20.0)
