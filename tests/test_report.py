"""The report: complete, self-contained, and text from a run stays text."""

import json
import platform
from html.parser import HTMLParser
from pathlib import Path

import pytest

from empo2_jax.charts import line_chart, ticks
from empo2_jax.config import Config
from empo2_jax.config_file import dump_toml
from empo2_jax.errors import DataError
from empo2_jax.metrics import JsonLines, MetricsLog
from empo2_jax.report import EPISODE_BYTES, embed_json, write_report
from empo2_jax.run_record import record_command

ATTACK = "</script><script>alert(1)</script><b>&amp;"
VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Checks nesting and gathers what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.urls: list[str] = []
        self.script: str = ""
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.urls += [value for key, value in attrs if key in ("src", "href") and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text.append(data)


def evaluation(label: str, iteration: int, score: float) -> dict[str, object]:
    rows = [{"task": "lamp", "variation": v, "scores": [score - 2, score + 4 * v - 2], "success": 0.5} for v in (0, 1)]
    numbers = {"score": score, "success": 0.5, "valid_actions": 0.125}
    return {"label": label, "iteration": iteration, "split": "test", "complete": True, "rows": rows, **numbers}


def make_run(folder: Path) -> Path:
    log = MetricsLog(folder)
    for iteration in (1, 2):
        log.write(
            iteration,
            {
                "episode/score": 10.5 * iteration,
                "empo2/on/ratio": 1.0,
                "empo2/off/ratio": 0.875,
                "timing_s/rollout": 3.0,
                "timing_s/update": 1.0,
                "timing_s/iteration": 4.0,
                "actor/entropy": float("nan"),
            },
        )
    log.close()
    lines = JsonLines(folder / "evaluations.jsonl")
    lines.append(evaluation("before", 0, 12.25))
    lines.append(evaluation("end", 2, 33.75))
    lines.close()
    (folder / "config.toml").write_text(dump_toml(Config()))
    (folder / "run.json").write_text(json.dumps({"command": f"empo2 train {ATTACK}", "commit": "abc1234"}))
    step = {"observation": ATTACK, "tips": [{"content": "look left", "score": 5.0}], "action": "look"}
    (folder / "episodes").mkdir()
    for iteration in (1, 2, 10):
        episode = {"id": f"i{iteration}/g0/e0", "steps": [step], "score": 1.0}
        (folder / "episodes" / f"{iteration}.jsonl").write_text(json.dumps(episode) + "\n")
    return folder


def test_page_is_well_formed_offline_and_shows_the_numbers(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "my-run"))
    page = Page(path.read_text())
    text = " ".join(page.text)
    assert path == tmp_path / "my-run" / "report.html"
    assert all(url.startswith("#") for url in page.urls)
    for expected in ("my-run", "12.25 → 33.75", "abc1234", "before @ 0", "end @ 2", "75.0 %", "0.875", "[algorithm]"):
        assert expected in text
    assert page.tags.count("svg") >= 4
    assert "Entropy" not in text  # only NaN: no empty picture


def test_adaptation_has_its_own_section_and_is_never_among_the_evaluations(tmp_path: Path) -> None:
    make_run(tmp_path)
    label = "test-time adaptation (sees test rewards)"
    assert label not in write_report(tmp_path).read_text()
    log = JsonLines(tmp_path / "adaptations.jsonl")
    rows = [{"task": "lamp", "variation": 0, "scores": [41.0, None]}]
    curves = {"score": [41.0, 19.0], "success": [0.0, 0.0], "best_score": [41.0, 43.0], "best_success": [0.0, 0.0]}
    log.append({"label": label, "iteration": 2, "split": "test", "memory": "empty", "rows": rows, **curves})
    log.close()
    page = write_report(tmp_path).read_text()
    Page(page)
    assert f">{label}</h2>" in page and "Checkpoint 2: lamp (test)" in page
    section = page[page.index(f">{label}</h2>") :]
    section = section[: section.index("</section>")]
    assert all(f"<td>{value}</td>" in section for value in ("41", "19", "43"))
    assert "43" not in page[page.index('id="panel"') : page.index("</table>")]
    assert "12.25 → 33.75" in page  # the panel's facts are those without adaptation


def test_text_of_a_run_is_never_markup(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path))
    page = Page(path.read_text())
    assert len(page.scripts) == 2 and "alert(1)" in page.scripts[0]
    episodes = json.loads(page.scripts[0])
    assert [episode["iteration"] for episode in episodes] == [1, 2, 10]
    assert episodes[0]["steps"][0]["observation"] == ATTACK
    assert f"empo2 train {ATTACK}" in "".join(page.text)
    assert "<b>" not in path.read_text()


def test_warm_start_is_shown_before_and_after(tmp_path: Path) -> None:
    make_run(tmp_path)
    log = JsonLines(tmp_path / "evaluations.jsonl", keep=0)
    log.append(evaluation("before warm start", 0, 8.0))
    log.append({**evaluation("start", 0, 20.5), "valid_actions": 0.75})
    log.close()
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "losses.json").write_text("[2.5, 1.5]")
    page = Page(write_report(tmp_path).read_text())
    text = " ".join(" ".join(page.text).split())
    assert "share of valid actions 0.125 0.75" in text
    assert "score, lamp / 0 6 18.5" in text
    assert "Warm-start loss" in text


def test_command_and_versions_stand_at_the_head(tmp_path: Path) -> None:
    MetricsLog(tmp_path).close()
    record_command(tmp_path, ["empo2", "train", "my config.toml"])
    text = " ".join(Page(write_report(tmp_path).read_text()).text)
    assert "empo2 train 'my config.toml'" in text and platform.python_version() in text


def test_a_run_with_metrics_alone_has_a_report(tmp_path: Path) -> None:
    MetricsLog(tmp_path).close()
    Page(write_report(tmp_path).read_text())


def test_missing_metrics_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl: no such file"):
        write_report(tmp_path)
    make_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(DataError, match=r"run\.json: not JSON"):
        write_report(tmp_path)


def test_long_runs_stay_within_the_budget(tmp_path: Path) -> None:
    make_run(tmp_path)
    heavy = json.dumps({"id": "x", "steps": [], "transcript": "a" * (EPISODE_BYTES // 4)}) + "\n"
    for iteration in range(11, 20):
        (tmp_path / "episodes" / f"{iteration}.jsonl").write_text(heavy)
    page = write_report(tmp_path)
    assert page.stat().st_size < EPISODE_BYTES * 1.1
    assert "of 12 recorded episodes" in page.read_text()


def test_embedded_json_is_the_same_value() -> None:
    value = {"text": f"{ATTACK} \u2028 é"}
    text = embed_json(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028") & set(text)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3.0, 47.0, [-10, 0, 10, 20, 30, 40, 50]), (5.0, 5.5, None)],
)
def test_ticks_are_round_and_enclose(low: float, high: float, expected: list[float] | None) -> None:
    values = ticks(low, high)
    assert values[0] <= low and values[-1] >= high
    assert expected is None or values == expected


def test_chart_places_points_and_escapes_labels() -> None:
    svg = line_chart("a <title>", {"<x>": [(0.0, 0.0), (1.0, 1.0)], "gone": [(0.0, float("nan"))]})
    Page(svg)
    assert 'points="62.0,260.0 626.0,14.0"' in svg
    assert "&lt;x&gt;" in svg and "gone" not in svg
    assert line_chart("empty", {"a": []}) == ""
