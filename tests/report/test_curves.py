"""Which metrics become which lines, and what is said of those that a run lacks."""

import re

from empo2_jax.report.curves import CHARTS, LEARNING, MODES, OPTIMIZATION, curves, score_by_time, series
from tests.fixtures.recorded import evaluation

WANTED = {  # what the page has to show (by title) and the metrics that it is drawn from
    "Importance ratio by mode": ["empo2/on/ratio", "empo2/on_memory/ratio", "empo2/off/ratio"],
    "Effective sample size": ["empo2/on/ess", "empo2/on_memory/ess", "empo2/off/ess"],
    "With tips against without: KL": ["empo2/on_memory/kl_tips_vs_bare", "empo2/off/kl_tips_vs_bare"],
    "With tips against without: ratio": ["empo2/on_memory/bare_ratio", "empo2/off/bare_ratio"],
    "With tips against without: sample size": ["empo2/on_memory/bare_ess", "empo2/off/bare_ess"],
    "Entropy by mode": ["empo2/on/entropy", "empo2/on_memory/entropy", "empo2/off/entropy"],
    "Entropy": ["actor/entropy"],
    "Memory": ["memory/size", "memory/evictions", "memory/duplicates"],
    "Groups": ["group/all_equal", "group/phantom", "group/shared_states", "episode/invalid"],
    "Engine against trainer": ["mismatch/logprob_abs_diff", "mismatch/kl"],
    "Engine against trainer, largest": ["mismatch/logprob_abs_diff_max"],
}


def test_what_the_page_has_to_show_is_drawn_from_these_metrics() -> None:
    names = [name for found in WANTED.values() for name in found]
    matched = {title: [name for name in names if re.fullmatch(pattern, name)] for _, title, pattern, _ in CHARTS}
    assert {title: sorted(matched[title]) for title in WANTED} == {t: sorted(n) for t, n in WANTED.items()}


def test_only_numbers_are_points_and_a_repeated_iteration_counts_once() -> None:
    records = [
        {"iteration": 2, "empo2/off/ratio": 0.5},
        {"iteration": 1, "empo2/off/ratio": "nan", "empo2/on/ratio": 1.0},
        {"iteration": 2, "empo2/off/ratio": 0.75, "empo2/on/ratio": True},
    ]
    assert series(r"empo2/(on|off)/ratio", records) == {"off": [(2.0, 0.75)], "on": [(1.0, 1.0)]}


def test_evaluations_stand_beside_training_and_gaps_are_named() -> None:
    drawn, missing = curves(LEARNING, [{"iteration": 1, "episode/score": 5.0}], [evaluation("end", 1, 9.0)])
    score = drawn[0].table
    assert score is not None and (score.columns, score.rows) == (["iteration", "episode", "val"], [["1", "5", "9"]])
    assert missing == ["Reward", "Episode length", "Groups"]
    other = [evaluation("start", 0, 1.0, split="dev"), evaluation("end", 1, 9.0)]
    drawn, _ = curves(LEARNING, [{"iteration": 0, "val/score": 1.0}, {"iteration": 1, "val/score": 9.0}], other)
    assert drawn[0].table is not None and drawn[0].table.rows == [["1", "9"]]  # other problems are on no line
    assert curves(MODES, [], [])[0] == []
    assert "Entropy" in curves(OPTIMIZATION, [{"iteration": 1, "actor/entropy": "nan"}], [])[1]


def test_charts_of_both_prompts_say_why_a_mode_may_be_missing() -> None:
    names = ("kl_tips_vs_bare", "bare_ratio", "bare_ess", "ratio")
    drawn, _ = curves(MODES, [{"iteration": 1} | {f"empo2/off/{name}": 0.5 for name in names}], [])
    said = 'With memory.placement = "history" there is no line on_memory: '
    assert [said in chart.note for chart in drawn] == [False, True, True, True]
    assert drawn[1].table is not None and drawn[1].table.columns == ["iteration", "off"]


def test_score_by_time_adds_up_minutes() -> None:
    metrics = [{"timing_s/iteration": 60.0, "episode/score": 1.0}, {"timing_s/iteration": 30.0, "episode/score": 2.0}]
    chart = score_by_time(metrics)
    assert chart is not None and chart.table is not None and chart.table.rows == [["1", "1"], ["1.5", "2"]]
    assert score_by_time([{"episode/score": 1.0}]) is None
    chart = score_by_time([{"timing_s/iteration": 60.0, "episode/score": "nan"}, *metrics])  # its time has passed too
    assert chart is not None and chart.table is not None and chart.table.rows == [["2", "1"], ["2.5", "2"]]
