"""The page: complete, self-contained, text from a run stays text, and in a real browser it does what it should."""

import json
import platform
from html.parser import HTMLParser
from pathlib import Path

import pytest

from empo2_jax.errors import DataError
from empo2_jax.metrics import MetricsLog
from empo2_jax.prompts import tip_entry
from empo2_jax.report import write_report
from empo2_jax.report.viewer import EPISODE_BYTES
from empo2_jax.run_record import record_command
from tests.fixtures.browser import CHROMIUM, CUT_OFF, Browser, browser
from tests.fixtures.recorded import (
    episode,
    evaluation,
    make_run,
    step,
    tip,
    write_checkpoint,
    write_episodes,
    write_lines,
)

ATTACK = "</script><script>alert(1)</script><b>&amp;"
VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Checks nesting and gathers what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.urls: list[str] = []
        self.scripts: list[str] = []
        self.pieces: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    @property
    def text(self) -> str:
        """What is read, spaces collapsed."""
        return " ".join(" ".join(self.pieces).split())

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
        (self.scripts if self.open and self.open[-1] == "script" else self.pieces).append(data)


def full_run(folder: Path) -> Path:
    """A run with everything: memory, novelty, phantom groups, hostile texts."""
    run = make_run(folder, iterations=2)
    (run / "run.json").write_text(json.dumps({"command": f"empo2 train {ATTACK}", "commit": "abc1234"}))
    saw = [(tip_entry("go left", "go", 70.0), 70.0)]
    for_two = {
        1: [
            episode("i0/g0/e0", score=10.0, steps=[step(ATTACK), step("a long\n\tattic")]),
            episode("i0/g0/e1", "OFF_POLICY", 40.0, steps=[step("hall", saw), step("attic")]),
            episode("i0/g1/e0", steps=[step(novelty=1.0)]),
            episode("i0/g1/e1", steps=[step(novelty=2.0)]),
        ],
        2: [episode("i1/g0/e0", score=100.0, tip_written="go left", stop_reason="step_limit"), episode("i1/g0/e1")],
    }
    write_episodes(run, for_two)
    write_checkpoint(run, 2, [tip(saw[0][0], 70.0, episode="i1/g0/e0")], {"toy/lamp/0": [3, 1], ATTACK: [2]})
    return run


def long_ticks(run: Path) -> Path:
    """The run with numbers whose ticks are long, and an iteration of four digits."""
    log = MetricsLog(run)
    for iteration, part in ((1000, 0.5), (2000, 1.0)):
        long = {"total/prompt_tokens": 2.5e5, "mismatch/logprob_abs_diff_max": 1.25e-5, "actor/pg_loss": -0.0105}
        log.write(iteration, {key: part * value for key, value in long.items()} | {"memory/size": 1000 + part / 100})
    log.close()
    return run


def test_page_is_well_formed_offline_and_shows_the_numbers(tmp_path: Path) -> None:
    path = write_report(full_run(tmp_path / "my-run"))
    page = Page(path.read_text())
    assert path == tmp_path / "my-run" / "report.html"
    assert all(url.startswith("#") for url in page.urls)
    assert "default-src 'none'" in path.read_text()
    for expected in ("my-run", "12.25 → 33.75", "abc1234", "before @ 0", "end @ 2", "75.0 %", "0.875", "[algorithm]"):
        assert expected in page.text
    for expected in (
        "go left toy/lamp/0 40.0 10.0 +30.0 1 1 / 0",  # a tip that helped
        "2 lookups were recorded, and 1 of them found a tip.",
        "3 distinct states at checkpoint 2",
        "i0/g1 1 toy/lamp/0 2 0 1 … 2",  # a phantom group
        "This run has no numbers for: Mode mix, Reward by mode",
    ):
        assert expected in page.text
    assert page.tags.count("svg") >= 5


def test_text_of_a_run_is_never_markup(tmp_path: Path) -> None:
    path = write_report(full_run(tmp_path))
    page = Page(path.read_text())
    assert len(page.scripts) == 2 and "alert(1)" in page.scripts[0]
    episodes = json.loads(page.scripts[0])
    assert [record["id"] for record in episodes][:2] == ["i0/g0/e0", "i0/g0/e1"]
    assert episodes[0]["steps"][0]["state_before"] == ATTACK
    assert f"empo2 train {ATTACK}" in page.text
    assert "<b>" not in path.read_text()


def test_adaptation_has_its_own_section_and_is_never_among_the_evaluations(tmp_path: Path) -> None:
    make_run(tmp_path)
    label = "test-time adaptation (sees test rewards)"
    assert label not in write_report(tmp_path).read_text()
    rows = [{"task": "lamp", "variation": 0, "scores": [41.0, None]}]
    lines = {"score": [41.0, 19.0], "success": [0.0, 0.0], "best_score": [41.0, 43.0], "best_success": [0.0, 0.0]}
    record = {"label": label, "iteration": 2, "split": "test", "memory": "empty", "rows": rows, **lines}
    failed = "Episodes of these adaptations failed, some means are of a part: checkpoint 2 (test)."
    write_lines(tmp_path / "adaptations.jsonl", record | {"complete": True})
    assert failed not in write_report(tmp_path).read_text()
    write_lines(tmp_path / "adaptations.jsonl", record | {"complete": False})
    page = write_report(tmp_path).read_text()
    Page(page)
    assert failed in page and "tips after each trial. Episodes failed: a trial" in page
    assert f">{label}</h2>" in page and "Checkpoint 2: lamp (test)" in page
    section = page[page.index(f">{label}</h2>") :]
    section = section[: section.index("</section>")]
    assert all(f"<td>{value}</td>" in section for value in ("41", "19", "43"))
    panel = page[page.index(">Evaluation without memory</h2>") :]
    assert "43" not in panel[: panel.index("</table>")]
    assert "12.25 → 33.75" in page  # the panel's facts are those without adaptation


def test_warm_start_is_shown_before_and_after(tmp_path: Path) -> None:
    make_run(tmp_path)
    after = evaluation("start", 0, 20.5, valid_actions=0.75)
    write_lines(tmp_path / "evaluations.jsonl", evaluation("before warm start", 0, 8.0), after)
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "losses.json").write_text("[2.5, 1.5]")
    text = Page(write_report(tmp_path).read_text()).text
    assert "share of valid actions 0.125 0.75" in text
    assert "score, lamp / 0 6 18.5" in text
    assert "Warm-start loss" in text


def test_command_and_versions_stand_at_the_head(tmp_path: Path) -> None:
    MetricsLog(tmp_path).close()
    record_command(tmp_path, ["empo2", "train", "my config.toml"])
    text = Page(write_report(tmp_path).read_text()).text
    assert "empo2 train 'my config.toml'" in text and platform.python_version() in text


def test_a_run_with_metrics_alone_has_a_report_that_says_what_is_missing(tmp_path: Path) -> None:
    MetricsLog(tmp_path).close()
    text = Page(write_report(tmp_path).read_text()).text
    for expected in (
        "No iteration is recorded yet.",
        "No evaluation is recorded yet.",
        "Nothing can be compared",
        "No recorded episode acted with memory.",
        "no checkpoint of this run can be read",
    ):
        assert expected in text


def test_a_run_of_another_version_has_a_page_that_says_what_is_left_out(tmp_path: Path) -> None:
    run = full_run(tmp_path)
    bare = {key: value for key, value in evaluation("end", 2, 33.75).items() if key != "complete"}
    write_lines(run / "evaluations.jsonl", evaluation("before", 0, 12.25), bare, evaluation("end", 2, 1.0, rows=[{}]))
    write_lines(run / "adaptations.jsonl", {"label": "adaptation", "iteration": 2, "rows": 3})
    write_episodes(run, {1: [episode(stop_reason="bored")]})
    write_checkpoint(run, 2, [{"content": "go left", "score": 70.0}])
    (run / "config.toml").write_text("[run]\nwarp_speed = 9\n")
    text = Page(write_report(run).read_text()).text
    for expected in (
        "evaluations.jsonl: 2 of 3 lines are left out; line 2: complete is missing.",
        "adaptations.jsonl: 1 of 1 lines are left out; line 1: split is missing.",
        "episodes/1.jsonl is left out: line 1: stop_reason = 'bored': 'done', 'step_limit', 'length', ",
        "Checkpoint 2 is passed over: an entry of the memory: buffer is missing.",
        "The groups are not listed: config.toml is missing or not understood",
    ):
        assert expected in text


def test_missing_metrics_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no metrics\.jsonl: not a run directory, or that of a run before"):
        write_report(tmp_path)
    make_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(DataError, match=r"run\.json: not JSON"):
        write_report(tmp_path)


def test_a_run_that_is_still_written_has_a_page_with_marks(tmp_path: Path) -> None:
    run = full_run(tmp_path)
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("iterations = 2", "iterations = 9"))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "epi')
    (run / "checkpoints/2/memory/tips.jsonl").unlink()
    text = Page(write_report(run).read_text()).text
    assert "The run is not finished: 2 of 9 iterations." in text
    assert "Checkpoint 2 is passed over: tips.jsonl: No such file or directory." in text
    assert "no checkpoint of this run can be read" in text


def test_long_runs_stay_within_the_budget(tmp_path: Path) -> None:
    make_run(tmp_path)
    heavy = episode(transcript="<|im_start|>é&" * (EPISODE_BYTES // 4 // 14))
    write_episodes(tmp_path, {1: [episode()], 2: [episode()], 3: [episode()], **{n: [heavy] for n in range(11, 20)}})
    page = write_report(tmp_path)
    assert page.stat().st_size < EPISODE_BYTES * 1.1
    assert "of 12 recorded episodes" in page.read_text()


CONTRAST = """(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = color => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(color[i] / 255), 0);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const worst = {ratio: 99, where: ""};
  for (const node of document.querySelectorAll("body *")) {
    const spoken = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    if (!spoken || !node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    const ink = light(parse(node.closest("svg") ? style.fill : style.color)), paper = light(ground(node));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < worst.ratio) Object.assign(worst, {ratio, where: node.outerHTML.slice(0, 80)});
  }
  return worst;
})()"""
UNNAMED = """[...document.querySelectorAll("input, select, button, [role=region], svg")].filter(node =>
  !node.getAttribute("aria-label") && !node.textContent.trim() && !node.closest("label")?.textContent.trim()
).map(node => node.outerHTML.slice(0, 80))"""


def press(tab: Browser, key: str, code: int, text: str = "") -> None:
    """One key, down and up."""
    for kind in ("keyDown", "keyUp"):
        shown = {"text": text} if text and kind == "keyDown" else {}
        tab.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **shown)


def visible_text(tab: Browser, selector: str) -> str:
    value = tab.evaluate(f"document.querySelector({selector!r}).innerText")
    assert isinstance(value, str)
    return value


@pytest.mark.medium
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_real_browser(tmp_path: Path, width: int) -> None:
    page = write_report(long_ticks(full_run(tmp_path / "run")))
    with browser(tmp_path / "profile") as tab:
        tab.call("Runtime.enable")
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        tab.open(page.as_uri())
        tab.wait("document.readyState === 'complete' && document.querySelector('#episode').length === 6")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("document.querySelectorAll('svg text').length") > 100
        assert tab.evaluate(CUT_OFF) == []
        worst = tab.evaluate(CONTRAST)
        assert worst["ratio"] >= 4.5, worst
        assert tab.evaluate(UNNAMED) == []
        assert tab.evaluate("[...document.querySelectorAll('.scroll')].every(box => box.tabIndex === 0)")
        assert tab.evaluate(
            "[...document.querySelectorAll('nav a, a.skip')].every(a => document.querySelector(a.getAttribute('href')))"
        )
        # nothing of the run ran, and nothing can be fetched
        assert tab.evaluate("document.querySelectorAll('main script, main b').length") == 0
        assert tab.evaluate("performance.getEntriesByType('resource').length") == 0
        # the keyboard comes first to the link over the head, then to the sections
        press(tab, "Tab", 9)
        assert tab.evaluate("document.activeElement.className") == "skip"
        press(tab, "Tab", 9)
        assert tab.evaluate("document.activeElement.getAttribute('href')") == "#s1"
        # filters of the viewer
        assert "Episode 1 of 6 that match" in visible_text(tab, "#count")
        for name, value, count in (
            ("outcome", "solved", 1),
            ("mode", "OFF_POLICY", 1),
            ("tips", "saw none", 5),
            ("iteration", "2", 2),
        ):
            tab.evaluate(f"{name}.value = {value!r}; {name}.dispatchEvent(new Event('change'))")
            assert tab.evaluate("document.querySelector('#episode').length") == count
            tab.evaluate("document.querySelector('#clear').click()")
        # the order, and walking with the buttons
        tab.evaluate("order.value = 'highest score'; order.dispatchEvent(new Event('change'))")
        assert "i1/g0/e0" in visible_text(tab, "#viewer")
        tab.evaluate("document.querySelector('#after').click()")
        assert "Episode 2 of 6" in visible_text(tab, "#count") and "i0/g0/e1" in visible_text(tab, "#viewer")
        # a tip of the tables leads to the episodes that saw or wrote it, and is marked there
        tab.evaluate("[...document.querySelectorAll('button.find')].find(b => b.textContent === 'go left').focus()")
        press(tab, "Enter", 13, "\r")
        assert tab.evaluate("document.querySelector('#episode').length") == 2
        assert tab.evaluate("[...document.querySelectorAll('#viewer mark')].map(m => m.textContent)") == ["go left"]
        tab.evaluate(
            "[...document.querySelectorAll('button.find')].find(b => b.textContent.startsWith('a long')).click()"
        )
        assert tab.evaluate("document.querySelector('#episode').length") == 1
        tab.evaluate("search.value = 'nowhere'; search.dispatchEvent(new Event('input'))")
        assert visible_text(tab, "#count") == "No episode matches."
        # the filter of a table
        table = "document.querySelector('#metrics .table')"
        tab.evaluate(f"{table}.closest('details').open = true")
        tab.evaluate(
            f"(i => {{i.value = 'EMPO2'; i.dispatchEvent(new Event('input'))}})({table}.querySelector('input'))"
        )
        assert tab.evaluate(f"[...{table}.querySelectorAll('tbody tr')].filter(r => r.checkVisibility()).length") == 2
        assert tab.evaluate(f"{table}.querySelector('[role=status]').textContent") == "2 of 10 rows"
        # print: no controls, nothing cut off
        tab.call("Emulation.setEmulatedMedia", media="print")
        assert tab.evaluate(
            "[...document.querySelectorAll('nav, .controls, #viewer')].every(n => !n.checkVisibility())"
        )
        assert tab.evaluate(
            "[...document.querySelectorAll('.scroll')].every(b => getComputedStyle(b).maxHeight === 'none')"
        )
        assert tab.evaluate("[...document.querySelectorAll('figure svg')].every(svg => svg.checkVisibility())")
