"""Streams equal the standard parser whatever the chunks; broken files say where; kept records read back."""

import json
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from empo2_jax.envs.webshop import records
from empo2_jax.errors import DataError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(VALUES, max_size=6), st.integers(1, 9), st.sampled_from([None, 1]))
def test_items_equal_the_whole_list(tmp_path_factory: pytest.TempPathFactory, values, chunk: int, indent) -> None:
    path = tmp_path_factory.mktemp("records") / "list.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=False), encoding="utf-8")
    with mock.patch.object(records, "CHUNK", chunk):
        assert list(records.items(path)) == values


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=6), st.integers(1, 9))
def test_members_equal_the_whole_object(tmp_path_factory: pytest.TempPathFactory, value, chunk: int) -> None:
    path = tmp_path_factory.mktemp("records") / "object.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    with mock.patch.object(records, "CHUNK", chunk):
        assert dict(records.members(path)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"record 0, character 0: .*\[ is expected, found the end of the file"),
        ('{"a": 1}', r"record 0, character 0: .*\[ is expected, found {"),
        ("[1, 2", "record 2, character 5: .*, or ] is expected, found the end"),
        ("[1, 2}", "record 2, character 5: .*found }"),
        ("[1, ]", "record 1, character 4: .*Expecting value"),
        ('[{"a": 1}, {"b" 2}]', "record 1, character 11: .*Expecting ':' delimiter"),
        ('["cut off', "record 0, character 1: .*Unterminated string"),
        ("[" + "[" * 100_000, "record 0, character 1: .*(nested too deeply|Expecting value)"),
    ],
)
def test_a_broken_list_names_record_and_character(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        list(records.items(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("[]", "{ is expected"), ("{1: 2}", "a key"), ('{"a" 1}', ": is exp")])
def test_a_broken_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        list(records.members(path))


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.json"
    path.write_bytes('["café"]'.encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        list(records.items(path))


def test_an_endless_record_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    path.write_text('["' + "x" * 5000)
    with mock.patch.object(records, "CHUNK", 16), mock.patch.object(records, "LARGEST", 64), pytest.raises(DataError):
        list(records.items(path))


def test_records_read_back_by_number(tmp_path: Path) -> None:
    writer = records.RecordWriter(tmp_path / "kept")
    values = [{"a": "é › \u2028"}, [1, 2.5, None], "x" * 1000]
    assert [writer.add(value) for value in values] == [0, 1, 2]
    writer.close()
    kept = records.RecordFile(tmp_path / "kept")
    assert [kept[number] for number in range(len(kept))] == values
    for number in (-1, 3):
        with pytest.raises(IndexError):
            kept[number]


def test_no_records_and_cut_records(tmp_path: Path) -> None:
    records.RecordWriter(tmp_path / "none").close()
    assert len(records.RecordFile(tmp_path / "none")) == 0
    writer = records.RecordWriter(tmp_path / "cut")
    writer.add("abc")
    writer.close()
    (tmp_path / "cut.jsonl").write_bytes(b'"a')
    with pytest.raises(DataError, match="cut or changed"):
        records.RecordFile(tmp_path / "cut")
