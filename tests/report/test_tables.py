"""Tables about the whole run, computed by hand."""

from pathlib import Path

from empo2_jax.report.run_files import read_run
from empo2_jax.report.tables import cost, facts, last_values, memory_share, panel, time_split
from tests.fixtures.recorded import evaluation, make_run, write_lines

TIMES = [
    {"timing_s/rollout": 6.0, "timing_s/memory": 1.0, "timing_s/novelty": 1.0, "timing_s/update": 2.0},
    {"timing_s/rollout": 10.0, "timing_s/memory": 1.0, "timing_s/novelty": 1.0, "timing_s/update": 3.0},
]
INSIDE = [
    {"timing_s/memory_in_rollout": 2.0, "timing_s/retrieval_in_rollout": 0.5, "timing_s/iteration": 99.0},
    {"timing_s/memory_in_rollout": 4.0, "timing_s/retrieval_in_rollout": 1.0, "timing_s/wait": 50.0},
]


def test_time_is_split_into_phases_that_do_not_overlap() -> None:
    metrics = [times | inside for times, inside in zip(TIMES, INSIDE, strict=True)]
    assert time_split(metrics) == [
        ("rollout", 16.0, 0.64),
        ("update", 5.0, 0.2),
        ("memory", 2.0, 0.08),
        ("novelty", 2.0, 0.08),
    ]


def test_memory_s_part_is_of_the_rollout_with_what_belongs_to_it() -> None:
    metrics = [times | inside for times, inside in zip(TIMES, INSIDE, strict=True)]
    assert memory_share(metrics) == [
        ("memory in all", 8.0, 0.4),
        ("committing tips", 2.0, 0.1),
        ("finding tips", 1.5, 0.075),
        ("the policy writing tips", 4.5, 0.225),
    ]
    assert memory_share(TIMES) == []  # a run that did not record it: no table rather than a wrong one
    assert [table.title for table in cost(TIMES)] == ["Time by phase"]
    assert cost([]) == []


def test_evaluations_that_do_not_compare_are_marked_in_their_column() -> None:
    lines = [evaluation("start", 0, 1.0, split="dev"), evaluation("during", 2, 10.0), evaluation("end", 4, 20.0)]
    (table,) = panel(lines).tables
    assert table.columns == ["variation", "start @ 0 †", "during @ 2", "end @ 4"]
    assert table.note.startswith("† does not compare")
    assert table.rows[0] == ["lamp / 0", "-1", "8", "18"]
    assert table.rows[1] == ["lamp / 1", "1", "10", "20"]
    (whole,) = panel(lines[1:]).tables
    assert whole.note == "" and "†" not in "".join(whole.columns)
    assert panel([]).missing == ["No evaluation is recorded yet."]


def test_at_most_six_evaluations_stand_side_by_side_with_their_own_marks() -> None:
    lines = [evaluation("during", n, float(n), complete=n != 10) for n in range(11)]
    (table,) = panel(lines).tables
    assert table.columns == ["variation", *(f"during @ {n}" for n in (0, 2, 4, 6, 8)), "during @ 10 †"]


def test_head_and_last_values(tmp_path: Path) -> None:
    found = facts(read_run(make_run(tmp_path)))
    assert found["iterations"] == "2" and found["seed"] == "0" and found["last training score"] == "21"
    assert found["panel score, first → last"] == "12.25 → 33.75"
    rows = last_values([{"iteration": 1, "a": 1.0}, {"iteration": 2, "a": 3.0, "b": "nan"}]).rows
    assert rows == [["a", "1", "3"], ["b", "nan", "nan"]]
    write_lines(tmp_path / "evaluations.jsonl", *(evaluation("x", n, 7.0 * n, split=s) for n, s in enumerate("dtt")))
    assert facts(read_run(tmp_path))["panel score, first → last"] == "7 → 14"
    (tmp_path / "run.json").write_text('{"earlier_commits": "c0ffee, dead"}')
    assert facts(read_run(tmp_path))["earlier commits"] == "c0ffee, dead"
