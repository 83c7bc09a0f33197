"""The soak with its real processes: simulators, two servers and a trainer, all of them killed."""

import pytest

from empo2_jax.bench import goals, runner

pytestmark = pytest.mark.slow


def test_a_quick_soak_meets_its_goals() -> None:
    pytest.importorskip("scienceworld")
    (case,) = runner.find_cases(("soak",), True)
    result = runner.run_case(case, True)
    assert result.problem == ""
    verdicts = goals.judge([result], goals.load())
    assert len(verdicts) == 17
    assert [verdict for verdict in verdicts if not verdict.met] == []
