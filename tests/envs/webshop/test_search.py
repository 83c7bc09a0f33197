"""The index finds stems, ranks by BM25, breaks ties by number, and takes any text for words."""

from pathlib import Path

import pytest

from empo2_jax.envs.webshop.search import HITS, IndexWriter, SearchIndex
from empo2_jax.errors import DataError

TEXTS = [
    "running shoes for women with rubber sole",
    "runner's shoe in navy blue",
    "coffee table of walnut",
    "table lamp",
    "table lamp lamp lamp",
]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SearchIndex:
    folder = tmp_path_factory.mktemp("search") / "index"
    writer = IndexWriter(folder)
    for number, text in enumerate([*TEXTS, *["the same chair"] * 70]):
        writer.add(number, text)
    writer.close()
    return SearchIndex(folder)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("shoes", [0, 1]),
        ("RUNS", [0]),
        ("lamps", [4, 3]),
        ("coffee tables", [2, 3, 4]),
        ("walnut", [2]),
        ("zebra", []),
        ("", []),
        ("the of and", []),
        ("!!! ???", []),
        ("\x00\x07", []),
        ('text:lamp AND (number:3 OR "', [4, 3]),
        ("lamp^9999 ~ * [a TO z]", [4, 3]),
    ],
)
def test_what_is_found(index: SearchIndex, query: str, found: list[int]) -> None:
    hits = index.search(query)
    assert hits[: len(found)] == found if "coffee" in query else hits == found


def test_at_most_fifty_and_ties_by_number(index: SearchIndex) -> None:
    hits = index.search("chair")
    assert len(hits) == HITS == 50
    assert hits == sorted(hits)
    assert hits == index.search("chairs")


def test_a_very_long_query_is_cut_to_its_first_words(index: SearchIndex) -> None:
    assert len(index.words(" ".join(f"word{number}" for number in range(50_000)))) == 64
    assert index.search("lamp " * 20_000) == [4, 3]


def test_a_broken_index_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="delete the folder above it"):
        SearchIndex(tmp_path)
