"""The results file and its check: equal, within, outside, of other configurations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from empo2_jax.errors import ConfigError, DataError
from empo2_jax.study.base import cells_of, load_study
from empo2_jax.study.page import write_page
from empo2_jax.study.results import RESULTS_FILE, Results, collect, differences, read_results, write_results
from tests.fixtures.studies import make_results, make_row, make_study

ROOT = Path(__file__).parents[2]
SCORES = {"new": [80.0, 90.0, 100.0, 70.0], "old": [10.0, 30.0, 20.0, 40.0]}


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    results = make_results(SCORES)
    write_results(tmp_path / RESULTS_FILE, results)
    assert read_results(tmp_path / RESULTS_FILE) == results
    lines = (tmp_path / RESULTS_FILE).read_text().splitlines()
    assert sum(line.startswith('  {"arm"') for line in lines) == 8  # a run a line


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_of_their_study_and_make_a_page(path: Path, tmp_path: Path) -> None:
    results, study = read_results(path), load_study(ROOT / f"configs/studies/{path.stem}.toml")
    assert results.study == study.name and set(results.arms) <= set(study.arms)
    assert not results.failed and not differences(results, results)
    cells = {(cell.arm.name, cell.seed): cell.fingerprint() for cell in cells_of(study)}
    for row in results.rows:
        assert results.fingerprint_today(row) == cells[row["arm"], row["seed"]]
    assert write_page(results, tmp_path / "page.html").stat().st_size > 10_000


def test_estimates() -> None:
    results = make_results(SCORES)
    assert results.score("new").value == 85.0  # of 80 and 90
    difference = results.difference("old")
    assert difference is not None and difference.value == 60.0
    # 70, 60, 80, 30: standard error 10.80, t with 3 degrees of freedom 3.182
    assert difference.low == pytest.approx(60 - 3.182 * 10.801, abs=0.01)
    assert results.better
    assert not make_results({"new": [50.0, 10.0], "old": [10.0, 50.0]}).better
    assert not make_results({"new": [50.0], "old": [10.0]}).better  # one seed has no interval


def test_differences_pair_the_seeds_that_both_have() -> None:
    results = make_results(SCORES)
    rows = [row for row in results.rows if (row["arm"], row["seed"]) not in (("old", 0), ("new", 3))]
    difference = replace(results, rows=rows).difference("old")
    assert difference is not None and difference.value == np.mean([90 - 30, 100 - 20])
    assert replace(results, rows=[row for row in rows if row["arm"] == "new"]).difference("old") is None


def test_equal_results_reproduce() -> None:
    assert differences(make_results(SCORES), make_results(SCORES)) == []
    fewer = make_results({name: values[:3] for name, values in SCORES.items()})
    assert differences(make_results(SCORES), fewer) == []


def test_a_differing_cell_is_named_with_its_interval() -> None:
    fresh = make_results(SCORES | {"old": [60.0, 50.0, 70.0, 60.0]})
    assert differences(make_results(SCORES), fresh) == [
        "old, score: 60.00 is outside of 10.00 to 40.00",
        "old, success: 0.60 is outside of 0.10 to 0.40",
    ]


def test_within_the_interval_is_reproduced() -> None:
    assert differences(make_results(SCORES), make_results(SCORES | {"old": [15.0, 25.0, 20.0, 35.0]})) == []


def test_adaptation_is_a_cell_of_its_own() -> None:
    def adapted(best: float) -> list[dict[str, object]]:
        curve = {"score": [0.0, best / 2], "best": [0.0, best]}
        return [make_row(arm, seed, 50.0, adaptation=curve) for arm in SCORES for seed in range(3)]

    committed, fresh = (replace(make_results(SCORES), rows=adapted(best)) for best in (50.0, 60.0))
    assert differences(committed, fresh)[:2] == [
        "new, last adaptation trial: 30.00 is outside of 25.00 to 25.00",
        "new, adaptation: 60.00 is outside of 50.00 to 50.00",
    ]
    unasked = make_results({name: [50.0] * 3 for name in SCORES})
    assert differences(unasked, fresh) == []  # the committed study had none
    assert differences(fresh, unasked) == [
        f"{arm}: no adaptation of seed 0, 1, 2, which the committed results have" for arm in SCORES
    ]
    rows = [row | {"adaptation": {"score": [30.0], "best": [60.0]}} for row in committed.rows]
    assert differences(committed, replace(fresh, rows=rows)) == [
        f"{arm}: the adaptations have different numbers of trials" for arm in SCORES
    ]


def test_adaptations_compare_over_the_seeds_that_both_have() -> None:
    first, second = {"score": [40.0], "best": [50.0]}, {"score": [41.0], "best": [50.0]}
    rows = make_results(SCORES).rows
    committed, fresh = (
        make_results(SCORES, rows=[row | ({"adaptation": c} if row["seed"] else {}) for row in rows])
        for c in (first, second)
    )
    expected = [f"{arm}, last adaptation trial: 41.00 is outside of 40.00 to 40.00" for arm in SCORES]
    assert differences(committed, fresh) == expected
    lost = [{k: v for k, v in row.items() if (k, row["seed"]) != ("adaptation", 2)} for row in fresh.rows]
    missing = [f"{arm}: no adaptation of seed 2, which the committed results have" for arm in SCORES]
    assert sorted(differences(committed, replace(fresh, rows=lost))) == sorted(expected + missing)


def test_cells_that_only_the_committed_results_have_are_named() -> None:
    committed = make_results(SCORES | {"third": [1.0, 2.0, 3.0]})
    fresh = make_results({name: values[:3] for name, values in SCORES.items()})
    assert differences(committed, fresh) == ["third: the committed results have it, and no run of it is there"]
    assert differences(committed, fresh, left_out=["third"]) == []
    listed = replace(fresh, arms=committed.arms)  # an arm of the study without a run is missing, too
    assert differences(committed, listed) == ["third: the committed results have it, and no run of it is there"]
    assert differences(replace(committed, rows=committed.rows[:8]), listed) == []  # none of it is committed
    rows = [row for row in fresh.rows if (row["arm"], row["seed"]) != ("old", 1)]
    assert differences(make_results(SCORES), replace(fresh, rows=rows)) == ["old: seed 1 was not run"]
    named = [row | {"problems": "a"} for row in committed.rows]
    assert differences(replace(committed, rows=named), fresh, ["third"]) == [
        f"{arm}: no problems of seed 0, 1, 2, which the committed results have" for arm in SCORES
    ]


def test_a_part_of_the_toy_study_does_not_pass_for_it() -> None:
    committed = read_results(ROOT / "results/toy.json")
    rows = [{k: v for k, v in row.items() if k != "adaptation"} for row in committed.of("empo2")]
    cut = replace(committed, arms={"empo2": committed.arms["empo2"]}, rows=rows)
    others = [f"{arm}: the committed results have it, and no run of it is there" for arm in committed.names[1:]]
    lost = "empo2: no adaptation of seed 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, which the committed results have"
    assert len(others) == 6 and differences(committed, cut) == [*others, lost]
    assert differences(committed, cut, left_out=committed.names[1:]) == [lost]


def test_another_configuration_panel_seed_or_arm_is_named() -> None:
    committed, fresh = make_results(SCORES), make_results(SCORES)
    changed = {name: arm | {"config": {"update.epochs": 2}} for name, arm in fresh.arms.items()}
    assert differences(committed, replace(fresh, arms=changed)) == [
        "new: another configuration: update.epochs was 1, is 2",
        "old: another configuration: update.epochs was 1, is 2",
    ]
    for value, said in ((0.25, []), (0.5, ["new: another configuration: algorithm.p_memory was 0.25, is 0.5"])):
        added = fresh.arms["new"]["config"] | {"algorithm.p_memory": value}  # the committed results have no such key
        assert differences(committed, replace(fresh, arms=fresh.arms | {"new": {"config": added}})) == said
    assert differences(make_results({"new": SCORES["new"], "other": [0.0]}), fresh) == [
        "other: the committed results have it, and no run of it is there",
        "old: no such arm in the committed results",
    ]
    assert differences(make_results(SCORES | {"old": [1.0]}), fresh) == ["old: the committed results lack seed 1"]
    rows = [row | {"tasks": {"other": 1.0}} for row in fresh.rows]
    assert differences(committed, replace(fresh, rows=rows))[0] == "new: another panel: other"
    assert differences(committed, replace(fresh, failed=["arm new, seed 1 failed: x"])) == [
        "not run: arm new, seed 1 failed: x"
    ]


def test_what_was_run_is_recorded(tmp_path: Path) -> None:
    study = load_study(make_study(tmp_path))
    results = collect(study, cells_of(study, 1), [make_row("new", 0, 1.0)], ["reason"], "empo2 study small.toml")
    assert results.arms["old"]["overrides"] == ["algorithm.p_memory=0.0"]
    config = results.arms["old"]["config"]
    assert config["algorithm.p_memory"] == 0.0 and "run.seed" not in config and "run.dir" not in config
    assert results.names == ["new"] and results.commits == ["c0ffee"] and results.failed == ["reason"]
    assert json.loads(json.dumps(config)) == config  # as a file gives it back


def test_other_problems_under_the_same_names_are_named() -> None:
    def played(problems: str, panel: str) -> Results:
        curve = {"score": [1.0], "best": [1.0], "panel": panel}
        return make_results(
            SCORES, rows=[make_row("new", s, 1.0, problems=problems, adaptation=curve) for s in range(3)]
        )

    committed = played("a", "x")
    assert differences(committed, replace(played("a", "x"), arms={"new": committed.arms["new"]})) == []
    for fresh, said in (
        (played("b", "x"), "new: other problems of these tasks were played"),
        (played("a", "y"), "new: the adaptation played other problems or began otherwise"),
    ):
        assert said in differences(committed, fresh)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a table of keys and values is allowed"),
        ('{"format": 2}', "not the results of a study in format 1"),
        ('{"format": 1, "rows": []}', "not the results of a study: study is missing"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_results(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_results(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": {}}, r"rows\[0\].arm = 'new': one of  is allowed"),
        ({"more": 1}, "not the results of a study: unknown key `more`"),
        ({"failed": [3]}, r"failed\[0\] = 3: text is allowed"),
        ({"panel": None}, r"rows\[7\].panel = None: a list is allowed"),
        ({"score": float("nan")}, r"rows\[7\].score = nan: a finite number is allowed"),
        ({"training": [[1, 2.0]]}, r"rows\[7\].training\[0\] = .*: more than 2 values are needed"),
        ({"tasks": {"lamp": "x"}}, r"rows\[7\].tasks.lamp = 'x': a number is allowed"),
        ({"tasks": {"door": 1.0}}, r"rows\[7\] and rows\[0\] have scores of different tasks"),
        ({"seed": 2}, r"rows\[7\] is a second one of arm old, seed 2"),
        ({"adaptation": {"score": []}}, r"rows\[7\].adaptation.score = \[\]: a length of at least 1"),
        ({"adaptation": None}, r"rows\[7\].adaptation = None: "),
        ({"fingerprint": []}, r"rows\[7\].fingerprint = \[\]: text is allowed"),
    ],
)
def test_results_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / RESULTS_FILE
    write_results(path, make_results(SCORES))
    values = json.loads(path.read_text())
    (values if change.keys() & (values.keys() | {"more"}) else values["rows"][7]).update(change)
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match=said):
        read_results(path)


def test_results_of_different_panels_are_refused(tmp_path: Path) -> None:
    results = make_results(SCORES)
    arms = {name: arm | {"config": {"env.products": 80 * n}} for n, (name, arm) in enumerate(results.arms.items(), 1)}
    write_results(tmp_path / "x.json", replace(results, arms=arms))
    with pytest.raises(ConfigError, match=r"x.json: old and new are evaluated on .* panels: env.products = 160 and 80"):
        read_results(tmp_path / "x.json")


def test_results_without_a_finished_run_have_no_page(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="study made: no finished run: arm new, seed 0 failed: no Java"):
        write_page(make_results(SCORES, rows=[], failed=["arm new, seed 0 failed: no Java"]), tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
