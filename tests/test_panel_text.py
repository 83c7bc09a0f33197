"""What the terminal shows of panels and adaptations."""

import pytest

from empo2_jax.panel_text import print_adaptation, print_panel


def test_panel_shows_the_mean_over_repeats_and_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"task": "lamp", "variation": 3, "scores": [10.0, 25.0], "success": 0.5}]
    numbers = {"score": 17.5, "success": 0.5, "valid_actions": 0.25, "complete": True}
    print_panel({"split": "test", "iteration": 7, "rows": rows, **numbers})
    shown = capsys.readouterr().out
    assert "test, checkpoint 7" in shown
    assert [cell.strip() for cell in shown.splitlines()[4].split("│")[1:5]] == ["lamp", "3", "17.5", "0.50"]
    assert shown.endswith("score 17.500 · success 0.500 · valid_actions 0.250 · complete True\n")


def test_adaptation_stands_under_its_label_trial_by_trial(capsys: pytest.CaptureFixture[str]) -> None:
    curves = {"score": [4.0, 2.0], "success": [0.0, 0.5], "best_score": [4.0, 6.0], "best_success": [0.0, 0.5]}
    print_adaptation(
        {"label": "sees rewards", "split": "dev", "iteration": 1, "memory": "empty", "complete": False, **curves}
    )
    shown = capsys.readouterr().out
    assert "sees rewards" in shown.splitlines()[0] and "dev, checkpoint 1, memory empty" in shown.splitlines()[1]
    cells = [[cell.strip() for cell in line.split("│")[1:6]] for line in shown.splitlines() if line.startswith("│")]
    assert cells == [["1", "4.0", "0.00", "4.0", "0.00"], ["2", "2.0", "0.50", "6.0", "0.50"]]
    assert shown.endswith("complete False\n")
