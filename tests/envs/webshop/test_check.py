"""The check of a data folder: what is missing, what is wrong, and nothing wrong where nothing is."""

from pathlib import Path

import pytest

from empo2_jax.cli import main
from empo2_jax.envs.webshop import synthetic
from empo2_jax.envs.webshop.check import check
from tests.fixtures.shop import raw, write_data


def found(data: Path) -> dict[str, str]:
    return {finding.name: finding.found for finding in check(data)}


def bad(data: Path) -> list[str]:
    return [finding.found for finding in check(data) if not finding.ok]


def test_a_made_folder_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["webshop", "make", str(tmp_path / "data"), "--products", "12", "--seed", "3"]) == 0
    assert main(["webshop", "check", str(tmp_path / "data")]) == 0
    assert "WRONG" not in capsys.readouterr().out
    assert found(tmp_path / "data")["usable products"] == "12, 0 of them without attributes"
    assert main(["webshop", "make", str(tmp_path / "data")]) == 2
    assert "not empty" in capsys.readouterr().err


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["webshop", "check", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "items_shuffle*.json is missing" in told.out
    assert f"error: {tmp_path}: " in told.err and "items_shuffle*.json is missing" in told.err
    assert any("items_ins_v2*.json is missing" in line for line in bad(tmp_path))


def test_human_goals_may_be_missing(tmp_path: Path) -> None:
    attributes = {"B000000001": {"attributes": ["a"], "instruction": "find", "instruction_attributes": ["a"]}}
    data = write_data(tmp_path / "data", [raw()], attributes)
    assert bad(data) == []
    assert "only synthetic goals" in found(data)["human"]
    assert found(data)["goals"] == "0 human, 4 synthetic"


def test_wrong_records_are_counted_and_the_first_ones_shown(tmp_path: Path) -> None:
    rows = [raw(f"B{number:09d}", **({"pricing": "$x"} if number else {})) for number in range(9)]
    data = write_data(tmp_path / "data", rows, {}, {"B000000000": [], "BX": []})
    wrong = bad(data)
    assert len([line for line in wrong if "pricing = '$x'" in line]) == 5
    assert wrong[-1] == "3 more"
    assert found(data)["instructions without product"] == "1"
    assert found(data)["usable products"] == "1, 1 of them without attributes"


def test_a_file_that_breaks_off(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", [raw()])
    (data / "items_shuffle.json").write_text('[{"asin": "B1')
    assert any("not valid JSON" in line for line in bad(data))


def test_a_synthetic_catalogue_is_a_function_of_count_and_seed(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate((1, 1, 2)):
        synthetic.make(tmp_path / str(number), 20, seed)
        texts.append([path.read_text() for path in sorted((tmp_path / str(number)).iterdir())])
    assert texts[0] == texts[1] != texts[2]
