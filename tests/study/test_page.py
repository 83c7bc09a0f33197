"""The page of a study: every number of the results, sources under every figure, text that stays text."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from empo2_jax.study.page import figures, write_page
from empo2_jax.study.statistics import Estimate
from empo2_jax.study.tables import adaptation, cost, entropy, interval_text, print_results, scores, seeds, tables
from tests.fixtures.browser import CHROMIUM, CUT_OFF, browser
from tests.fixtures.studies import make_results, make_row

SCORES = {"new": [80.0, 90.0, 100.0, 70.0], "old": [10.0, 30.0, 20.0, 40.0]}


def test_tables_have_the_numbers() -> None:
    results = make_results(SCORES | {"old": [10.0, 30.0]})
    first, second = scores(results).rows
    assert first[:3] == ["new", "4", "85.0"] and first[4:] == ["85.0", ""]
    assert second[:3] == ["old", "2", "20.0"] and second[5].startswith("+65.0 [")
    assert seeds(results).columns == ["arm", "0", "1", "2", "3"]
    assert seeds(results).rows == [["new", "80.0", "90.0", "100.0", "70.0"], ["old", "10.0", "30.0", *2 * ["missing"]]]
    assert cost(results).rows[0] == ["new", "120", "8", "10", "20", "30", "4", "25"]
    unknown = [row | {"memory_share": None} for row in results.rows]
    assert cost(replace(results, rows=unknown)).rows[0][-1] == "–"
    assert [table.title for table in tables(results)] == ["Scores", "Seeds", "Cost"]
    rows = [row | {"tasks": {"lamp": 10.0, "door": 30.0}} for row in results.rows]
    named = {table.title: table for table in tables(replace(results, rows=rows))}
    assert named["Tasks"].rows == [["lamp", "10.0", "10.0"], ["door", "30.0", "30.0"]]


def test_what_trials_with_memory_change() -> None:
    results = make_results(SCORES)
    assert not adaptation(results).rows
    curves = {seed: {"score": [50.0, 20.0, last], "best": [50.0, 60.0, 60.0]} for seed, last in enumerate((30.0, 10.0))}
    rows = [row | {"adaptation": curves[row["seed"]]} for row in results.of("new") if row["seed"] in curves]
    (row,) = adaptation(replace(results, rows=rows)).rows  # -20 and -40: standard error 10, t with one degree 12.706
    assert row == ["new", "50.0", "20.0", "-30.0 [-157.1, +97.1]", "60.0"]


def test_entropy_by_quarter_and_against_the_reference() -> None:
    results = make_results(SCORES)
    assert not entropy(results).rows  # two iterations have no quarters
    starts = {("new", 0): 1.0, ("new", 1): 1.2, ("old", 0): 0.5, ("old", 1): 0.5, ("old", 2): 9.0}

    def training(start: float) -> list[list[float | None]]:
        nats = [start, start, start / 2, start / 2, 0.3, 0.5, 0.2, 0.2]
        return [[n + 1, 0.0, entropy, 1.0] for n, entropy in enumerate(nats)] + [[9, 0.0, None, 1.0]]

    rows = [
        row | {"training": training(starts[key])}
        for row in results.rows
        if (key := (row["arm"], row["seed"])) in starts
    ]
    new, old = entropy(replace(results, rows=rows)).rows
    # 0.5 and 0.7: standard error 0.1, t 12.706; seed 2 has no partner
    assert new == ["new", "1.100", "0.550", "0.400", "0.200", "+0.600 [-0.671, +1.871]", "+0.000 [+0.000, +0.000]"]
    assert old == ["old", "3.333", "1.667", "0.400", "0.200", "", ""]


def test_intervals_as_text() -> None:
    assert interval_text(Estimate(1.25, -2.0, 4.0), signed=True) == "+1.2 [-2.0, +4.0]"
    assert interval_text(Estimate(0.1234, -0.2, 4.0), digits=3) == "0.123 [-0.200, 4.000]"
    assert interval_text(Estimate(1.25, float("-inf"), float("inf"))) == "1.2"


def test_figures_have_the_curves_of_the_rows() -> None:
    curve = {"score": [0.0, 5.0], "best": [0.0, 8.0]}
    results = make_results(SCORES)
    with_curves = replace(results, rows=[row | {"adaptation": curve} for row in results.rows])
    made = {figure.title: figure for figure in figures(with_curves)}
    assert list(made) == [
        *("Scores", "What each change costs", "Learning curves", "Training score", "Score against wall time"),
        *("Entropy", "Adaptation", "Best adaptation"),
    ]
    assert made["Learning curves"].table.rows[:2] == [["new", "0", "0", "0", "0"], ["new", "2", "85", "70", "100"]]
    assert made["Score against wall time"].table.rows[1] == ["new", "2", "85"]
    assert made["Adaptation"].table.rows[1] == ["new", "2", "5"]
    assert made["Best adaptation"].table.rows[1] == ["new", "2", "8"]
    assert made["What each change costs"].table.rows[0][:2] == ["old", "60"]
    assert made["What each change costs"].note.startswith("new less the arm: mean paired difference")
    assert "Adaptation" not in {figure.title for figure in figures(results)}


def test_many_arms_are_drawn_in_several_pictures() -> None:
    names = ["old", "new", "gigpo", "p_1", "p_2", "p_3", "p_4", *(f"q_{n}" for n in range(5)), "mask"]
    results = replace(make_results({name: [50.0, 60.0] for name in names}), tested="new", reference="old")
    drawn = [list(dict.fromkeys(row[0] for row in f.table.rows)) for f in figures(results) if "curves" in f.title]
    assert drawn == [
        ["new", "old", "gigpo", "p_1", "p_2", "p_3", "p_4"],
        ["new", "old", *(f"q_{n}" for n in range(5)), "mask"],
    ]
    titles = [figure.title for figure in figures(results)]
    assert titles[:4] == ["Scores", "What each change costs", "Learning curves, 1 of 2", "Learning curves, 2 of 2"]
    many = make_results({name: [50.0] for name in ("new", "old", *(f"q_{n}" for n in range(20)))})
    parts = [f for f in figures(many) if f.title.startswith("Entropy")]
    assert [len({row[0] for row in f.table.rows}) for f in parts] == [8, 8, 8, 4]


def test_scores_that_have_seen_test_rewards_are_marked_and_in_no_curve_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, curve = make_results(SCORES), {"score": [0.0, 5.0], "best": [0.0, 8.0]}
    assert [row[0] for row in scores(results).rows] == ["new", "old"] and "†" not in scores(results).note
    changed = {"protocol": "trials", "adaptation": curve}
    results = replace(results, rows=[row | (changed if row["arm"] == "old" else {}) for row in results.rows])
    assert [row[0] for row in scores(results).rows] == ["new", "old †"]
    assert scores(results).note.endswith("† Of the last trial, which has seen test rewards.")
    assert [row[0] for row in seeds(results).rows] == ["new", "old †"]
    assert seeds(results).note.endswith("seen test rewards.")
    arms = {figure.title: {row[0] for row in figure.table.rows} for figure in figures(results)}
    assert arms["Scores"] == {"new", "old †"} and arms["What each change costs"] == {"old †"}
    for title in ("Learning curves", "Training score", "Score against wall time", "Entropy"):
        assert arms[title] == {"new"}
    assert arms["Adaptation"] == arms["Best adaptation"] == {"old"}
    said = "old: the score is that of its last trial, which has seen test rewards."
    text = write_page(results, tmp_path / "p.html").read_text()
    assert said in text and "new: the score" not in text
    print_results(results)
    assert said in capsys.readouterr().out


def test_a_printed_name_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_results(make_results({"[/x]": [1.0], "[bold]old": [2.0]}, study="[/a]"))
    text = capsys.readouterr().out
    assert "study [/a]: scores" in text and " [/x] " in text and " [bold]old " in text


def test_a_printed_table_is_as_wide_as_its_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    scores = {f"an_arm_with_a_long_name_{n:02}": [100 * n + seed / 8 for seed in range(20)] for n in range(30)}
    print_results(make_results(scores))
    text = capsys.readouterr().out
    assert "…" not in text
    for name, values in scores.items():
        assert name in text and all(f" {value:.1f} " in text for value in values)


def test_runs_on_other_problems_are_said(tmp_path: Path) -> None:
    results = make_results(SCORES)
    for others, said in (({}, False), ({"problems": "a"}, False), ({"problems": "b"}, True)):
        rows = [row | ({"problems": "a"} if row["seed"] else others) for row in results.rows]
        text = write_page(replace(results, rows=rows), tmp_path / "p.html").read_text()
        assert ("Not all runs played the same problems" in text) == said


def test_every_figure_names_command_commit_and_configurations(tmp_path: Path) -> None:
    results = make_results(SCORES | {"<b>": [1.0, 2.0]}, failed=["arm <i>, seed 1"])
    page = write_page(
        replace(results, rows=[*results.rows, make_row("old", 9, 1.0, commit="beef")]), tmp_path / "p.html"
    )
    text = page.read_text()
    sources = re.findall(r"From: <code>(.+?)</code> · <a href=\"#configurations\">", text)
    assert len(sources) == text.count("<figure>") == 6
    assert set(sources) == {"empo2 study made.toml · commit c0ffee, beef"}
    assert "Runs of 2 commits are compared: c0ffee, beef." in text
    assert "was begun by" not in text
    assert "<b>" not in text and "<i>" not in text and "&lt;b&gt;" in text
    assert "http" not in text and "<script" not in text
    assert "<code>base.toml</code><br><code>x=0</code>" in text


def test_a_run_that_other_code_began_is_named_with_its_commits(tmp_path: Path) -> None:
    results = make_results(SCORES)
    rows = [*results.rows[1:], make_row("new", 0, 80.0, earlier_commits="dead-dirty, beef")]
    text = write_page(replace(results, rows=rows), tmp_path / "p.html").read_text()
    assert "new, seed 0 was begun by other code and continued: dead-dirty, beef." in text
    assert "<dt>commit</dt><dd>c0ffee, dead-dirty, beef</dd>" in text
    assert "Runs of 3 commits are compared: c0ffee, dead-dirty, beef." in text
    assert "Code that was changed after its commit: dead-dirty." in text


@pytest.mark.medium
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_phone_and_a_desk_in_a_real_browser(tmp_path: Path, width: int) -> None:
    arms = {name: [50.0, 60.0, 70.0] for name in ("new", "old", *(f"a_rather_long_name_for_one_{n}" for n in range(8)))}
    results, curve = make_results(arms), {"score": [0.0, 5.0], "best": [0.0, 8.0]}
    training = [[n, 1.0, 1.5, 60.0 * n] for n in range(1, 6)]
    more = {"training": training, "adaptation": curve, "tasks": {"lamp": 1.0, "door": 2.0}}
    page = write_page(replace(results, rows=[row | more for row in results.rows]), tmp_path / "page.html")
    with browser(tmp_path / "profile") as tab:
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        tab.open(page.as_uri())
        tab.wait("document.readyState === 'complete' && document.querySelectorAll('figure').length === 14")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("document.querySelectorAll('svg text').length") > 100
        assert tab.evaluate(CUT_OFF) == []
        size = tab.evaluate("getComputedStyle(document.querySelector('svg text')).fontSize")
        assert size == ("15px" if width < 500 else "13px")  # of 480 units that are as wide as the screen
        # wide tables scroll in themselves, and the keyboard gets there
        assert tab.evaluate("[...document.querySelectorAll('.scroll')].every(box => box.tabIndex === 0)")
        assert tab.evaluate("[...document.querySelectorAll('svg')].every(svg => svg.getAttribute('aria-label'))")
        tab.evaluate("document.querySelector('summary').click()")
        assert tab.evaluate("document.querySelector('figure details').open")
        targets = "[...document.querySelectorAll('nav a')].map(a => document.querySelector(a.getAttribute('href')))"
        assert tab.evaluate(f"{targets}.every(Boolean)")
