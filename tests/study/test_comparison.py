"""Runs side by side: what is refused, what is marked."""

import re
from pathlib import Path

import pytest

from empo2_jax.cli import main
from empo2_jax.config_file import load_config
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.metrics import read_jsonl
from empo2_jax.run_record import record_config
from empo2_jax.study.comparison import compare_runs
from empo2_jax.study.results import write_results
from tests.fixtures.recorded import write_lines
from tests.fixtures.studies import make_adaptation, make_results, make_run

PANEL = Path(__file__).parents[2] / "configs/panels/toy.toml"


def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make_run(tmp_path / "a/seed0", 40.0)
    second = make_run(tmp_path / "b/seed0", 60.0, "algorithm.p_memory=0.5")
    page = tmp_path / "page.html"
    assert main(["report", str(first), str(second), "--out", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text()
    assert "<td>a/seed0</td><td>iteration 2</td><td>40.0</td><td>50.0</td>" in text
    assert "<td>algorithm.p_memory</td><td>0.25</td><td>0.5</td>" in text
    assert 'class="warning"' not in text
    assert f"empo2 report {first} {second} · commit c0ffee" in text


def test_unequal_commits_and_unfinished_runs_are_marked(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a", 40.0), make_run(tmp_path / "b", 60.0, "run.iterations=5", commit="beef")
    lines = (second / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (second / "evaluations.jsonl").write_text(lines[0] + lines[1][:40])  # being written
    (first / "run.json").write_text('{"commit": "c0ffee", "earlier_commits": "dead"}')
    text = compare_runs([first, second], tmp_path / "page.html").read_text()
    assert "The runs are of different commits: c0ffee, beef." in text
    assert "a was begun by other code and continued: dead." in text
    assert "Last evaluations after unequal numbers of iterations: a after 2, b after 0." in text
    assert "b is not finished: 2 of 5 iterations." in text
    assert "<td>b</td><td>iteration 0</td><td>0.0</td>" in text


def test_what_does_not_compare_is_refused(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", 40.0)
    other = make_run(tmp_path / "b", 60.0, "evaluation.repeats=9")
    with pytest.raises(ConfigError, match=r"report: b and a are evaluated on different panels: evaluation.repeats = 9"):
        compare_runs([first, other], tmp_path / "page.html")
    with pytest.raises(ConfigError, match="a run is named twice"):
        compare_runs([first, tmp_path / "b/../a"], tmp_path / "page.html")
    with pytest.raises(DataError, match=r"nowhere: not a run directory \(no config.toml\)"):
        compare_runs([first, tmp_path / "nowhere"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_other_problems_or_catalogues_are_refused(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a", 40.0), make_run(tmp_path / "b", 60.0)
    start, last = read_jsonl(second / "evaluations.jsonl")
    write_lines(second / "evaluations.jsonl", start, last | {"rows": last["rows"][:1]})
    with pytest.raises(ConfigError, match="report: b and a played different problems in their last evaluations"):
        compare_runs([first, second], tmp_path / "page.html")
    shops = [make_run(tmp_path / f"shop{n}", 1.0, 'env.name="webshop"', f"env.products={n}") for n in (80, 90)]
    with pytest.raises(ConfigError, match=r"on different panels: env.products = 90 and 80"):
        compare_runs(shops, tmp_path / "page.html")


def test_adaptations_that_do_not_compare_are_left_out(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a", 40.0), make_run(tmp_path / "b", 60.0)
    for folder in (first, second):
        write_lines(folder / "adaptations.jsonl", make_adaptation())
    page = tmp_path / "page.html"
    assert ">Best adaptation<" in compare_runs([first, second], page).read_text()
    write_lines(second / "adaptations.jsonl", make_adaptation(split="dev"))
    text = compare_runs([first, second], page).read_text()
    assert "The newest adaptations played other problems or began otherwise; they are left out." in text
    assert "Best adaptation" not in text
    write_lines(second / "adaptations.jsonl", make_adaptation(complete=False))
    text = compare_runs([first, second], page).read_text()
    assert (
        "b: the newest adaptation is left out, since episodes of it failed." in text
        and "<td>a</td><td>iteration 2</td>" in text
    )
    (second / "adaptations.jsonl").write_text("")  # of an adaptation that did not get to its end
    assert "left out" not in compare_runs([first, second], page).read_text()


@pytest.mark.parametrize(
    ("trials", "score", "said"),
    [(2, 40.0, ""), (10, 100.0, ""), (10, 40.0, "tries is not finished: 2 of 10 trials.")],
)
def test_trials_are_marked_and_no_iterations(tmp_path: Path, trials: int, score: float, said: str) -> None:
    trained = make_run(tmp_path / "trained", 60.0)
    made = ('algorithm.name="reflexion"', "algorithm.p_memory=0.0", 'intrinsic.kind="none"', "run.iterations=40")
    tries = make_run(tmp_path / "tries", score, *made, f"reflexion.trials={trials}")
    (tries / "evaluations.jsonl").unlink()
    write_lines(tries / "adaptations.jsonl", make_adaptation([0.0, score]))
    text = compare_runs([trained, tries], tmp_path / "page.html").read_text()
    assert f"<td>tries †</td><td>trial 2</td><td>{score}</td>" in text
    assert "<td>trained</td><td>iteration 2</td><td>60.0</td>" in text
    scores = text[text.index("Last evaluation without memory: ") :]
    assert "† Of the last trial, which has seen test rewards." in scores[: scores.index("</p>")]
    assert "unequal numbers of iterations" not in text
    warnings = re.findall('class="warning" role="alert">([^<]*)<', text)
    seen = "tries: the score is that of its last trial, which has seen test rewards."
    assert warnings == ([said] if said else []) + [seen]


def test_runs_with_their_own_copies_of_one_panel_compare(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, 40.0) for name in "ab"]
    for folder in folders:
        record_config(load_config(tmp_path / "base.toml", [f"run.dir={folder}", f"evaluation.panel={PANEL}"]))
    assert "<td>b</td><td>iteration 2</td><td>40.0</td>" in compare_runs(folders, tmp_path / "page.html").read_text()
    panel = folders[1] / "panel.toml"
    panel.write_text(panel.read_text().replace("seed = 0", "seed = 1"))
    (folders[1] / "config.toml").write_text('[env]\nname = "toy"\n[evaluation]\npanel = "panel.toml"\n')
    with pytest.raises(ConfigError, match=r"evaluation\.panel = 'panel \w{12}' and 'panel \w{12}'"):
        compare_runs(folders, tmp_path / "page.html")


def test_the_page_of_committed_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(tmp_path / "made.json", make_results({"new": [80.0, 90.0], "old": [10.0, 30.0]}))
    assert main(["report", str(tmp_path / "made.json"), "--out", str(tmp_path / "made.html")]) == 0
    assert "Study made" in (tmp_path / "made.html").read_text()
    assert main(["report", str(tmp_path), "--out", "x.html"]) == 2
    assert "leave out --out" in capsys.readouterr().err
