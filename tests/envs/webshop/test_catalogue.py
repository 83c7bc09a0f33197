"""Building once from files, finding it again by content, and one clear line for what is wrong with them."""

import json
import shutil
from pathlib import Path

import pytest

from empo2_jax.envs.webshop import catalogue
from empo2_jax.envs.webshop.catalogue import Counts, content_hash, find_files, open_catalogue
from empo2_jax.errors import ConfigError, DataError
from tests.fixtures.shop import INJECTION, raw, write_data

A, B = "B000000001", "B000000002"
ATTRIBUTES = {
    A: {"attributes": ["soft"], "instruction": "Find me shoes", "instruction_attributes": ["soft"]},
    B: {"attributes": ["hard"], "instruction": None, "instruction_attributes": None},
}
HUMAN = {
    B: [
        {"instruction": "i need\nboots.", "instruction_attributes": ["hard"], "instruction_options": ["10 | 11"]},
        {"instruction": "no attributes", "instruction_attributes": [], "instruction_options": []},
    ],
    "B999999999": [],
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EMPO2_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "webshop"


def built(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name.startswith("v"))


def test_products_goals_and_search_of_a_folder(tmp_path: Path) -> None:
    rows = [raw(A), raw(B, name="Brontel Boots"), raw(A, name="again"), raw("nan"), raw("B0000000012")]
    made = open_catalogue(write_data(tmp_path / "data", rows, ATTRIBUTES, HUMAN))
    assert made.counts == Counts(products=2, unusable=2, repeated=1, human=1, synthetic=1)
    assert [made.product(number).title for number in range(len(made))] == ["Alderwick Trail Shoes", "Brontel Boots"]
    assert made.product(1).attributes == ("hard",)
    assert made.search("boot") == [1]
    human = made.goals("human")
    assert len(human) == 1 and human[0].instruction.startswith("i need boots, and price lower than ")
    assert human[0].options == ("10 | 11",)
    assert len(made.goals("synthetic")) == len(made.goals("synthetic-original-order")) == 4


def test_a_build_is_found_again_and_follows_the_content(tmp_path: Path, cache: Path) -> None:
    data = write_data(tmp_path / "data", [raw(A)], ATTRIBUTES)
    first = open_catalogue(data).folder
    before = (first / "catalogue.json").stat().st_mtime_ns
    assert open_catalogue(data).folder == first
    copy = write_data(tmp_path / "copy", [raw(A)], ATTRIBUTES)
    assert open_catalogue(copy).folder == first
    assert (first / "catalogue.json").stat().st_mtime_ns == before
    write_data(tmp_path / "data", [raw(A), raw(B)], ATTRIBUTES)
    assert open_catalogue(data).folder != first
    assert len(built(cache)) == 2


def test_a_human_file_is_part_of_the_content(tmp_path: Path) -> None:
    files = [find_files(write_data(tmp_path / name, [raw(A)], {}, human)) for name, human in (("a", None), ("b", {}))]
    assert content_hash(files[0]) != content_hash(files[1])


def test_layout_and_engine_are_part_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    data = write_data(tmp_path / "data", [raw(A)])
    open_catalogue(data)
    monkeypatch.setattr(catalogue, "LAYOUT", 99)
    assert open_catalogue(data).folder.name.startswith("v99-tantivy-")
    assert len(built(cache)) == 2


def test_a_failed_build_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(DataError):
        open_catalogue(write_data(tmp_path / "data", [raw(A), raw(B, name=7)]))
    assert built(cache) == []


def test_the_first_of_two_builds_wins(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_data(tmp_path / "data", [raw(A)])
    write = catalogue._write

    def overtaken(source, folder: Path) -> Counts:
        counts = write(source, folder)
        other = catalogue._description(source.files, counts)
        (folder / "catalogue.json").write_text(json.dumps(other), encoding="utf-8")
        shutil.copytree(folder, folder.with_suffix(""))
        return counts

    monkeypatch.setattr(catalogue, "_write", overtaken)
    assert len(open_catalogue(data)) == 1
    assert len(built(cache)) == 1


def test_damaged_parts_are_noticed(tmp_path: Path) -> None:
    folder = open_catalogue(write_data(tmp_path / "data", [raw(A)])).folder
    text = json.loads((folder / "catalogue.json").read_text())
    text["counts"]["products"] = 2
    (folder / "catalogue.json").write_text(json.dumps(text))
    with pytest.raises(DataError, match="do not belong together"):
        open_catalogue(tmp_path / "data")


@pytest.mark.parametrize(
    ("rows", "attributes", "human", "message"),
    [
        ([raw(A), {"asin": B}], {}, None, r"items_shuffle.json: record 1: name is missing"),
        ([raw(A, pricing="$cheap")], {}, None, r"items_shuffle.json: record 0 \(B000000001\): pricing = '\$cheap'"),
        ([raw(A)], {A: {"attributes": "soft"}}, None, "items_ins_v2.json: B000000001: attributes = 'soft'"),
        ([raw(A)], {A: []}, None, r"items_ins_v2.json: B000000001: the record = \[\]"),
        ([raw(A)], {}, {A: {}}, "items_human_ins.json: B000000001: a list of instructions"),
        (
            [raw(A)],
            {},
            {A: [{"instruction": "x"}]},
            "human_ins.json: B000000001: instruction 0: instruction_attributes",
        ),
        ([raw("nan")], {}, None, "items_shuffle.json: no usable product"),
        ([], {}, None, "items_shuffle.json: no usable product"),
        ({}, {}, None, r"items_shuffle.json: record 0, character 0: .*\[ is expected"),
    ],
)
def test_wrong_data_is_one_line(tmp_path: Path, rows, attributes, human, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        open_catalogue(write_data(tmp_path / "data", rows, attributes, human))
    assert "\n" not in str(caught.value)


def test_injected_text_is_stored_as_one_line_of_text(tmp_path: Path) -> None:
    made = open_catalogue(write_data(tmp_path / "data", [raw(A, name=f"Shoes\n\x1b[2J{INJECTION}\r\n")]))
    assert made.product(0).title == f"Shoes [2J{INJECTION}"
    assert made.search(INJECTION) == [0]


def test_files_are_found_or_named_as_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        find_files(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no items_shuffle\*.json there"):
        find_files(tmp_path)
    (tmp_path / "items_shuffle_1000.json").touch()
    with pytest.raises(ConfigError, match=r"no items_ins_v2\*.json there"):
        find_files(tmp_path)
    (tmp_path / "items_ins_v2_1000.json").touch()
    assert find_files(tmp_path).products.name == "items_shuffle_1000.json"
    for name in ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="name one product file"):
        find_files(tmp_path)
    small = find_files(tmp_path / "items_shuffle_1000.json")
    assert [path.name for path in small if path] == [
        "items_shuffle_1000.json",
        "items_ins_v2_1000.json",
        "items_human_ins.json",
    ]
    assert find_files(tmp_path / "items_shuffle.json").attributes.name == "items_ins_v2.json"
