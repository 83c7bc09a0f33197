"""Which prompt each ledger is under: a stand-in policy to which tips make every token likelier."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from empo2_jax.data.rows import build_rows
from empo2_jax.learner.ledgers import fill
from empo2_jax.types import Episode, Mode, Row
from tests.fixtures.episodes import TIP_ID, make_episode

BARE, TIPPED = -1.0, -0.25  # nats per token, times the step's number from 1


def score(rows: Sequence[Row]) -> list[np.ndarray]:
    values = []
    for row in rows:
        seen = np.cumsum(row.token_ids == TIP_ID) > 0
        values.append(np.where(row.loss_mask, np.where(seen, TIPPED, BARE) * (row.step_index + 1), 0.0))
    return [value.astype(np.float32) for value in values]


def episodes() -> list[Episode]:
    return [make_episode([[5, 6], [7]], mode=mode) for mode in Mode]


def filled(denominator: str, cap: float | None, **settings) -> tuple[list[Row], dict[str, float]]:
    rows = build_rows(episodes(), [1.0] * 3)
    return fill(rows, episodes(), score, denominator=denominator, correction_cap=cap, **settings)


def actions(row: Row, values: np.ndarray | None) -> list[float]:
    assert values is not None and not values[~row.loss_mask].any()
    return values[row.loss_mask].tolist()


@pytest.mark.parametrize(("denominator", "off"), [("student", BARE), ("behavior", TIPPED)])
def test_denominator_is_under_the_loss_prompt_or_the_acting_prompt(denominator: str, off: float):
    rows, _ = filled(denominator, None)
    for row, value in zip(rows, (BARE, TIPPED, off), strict=True):
        assert actions(row, row.denominator_logprobs) == [value, value, 2 * value]
        assert row.rollout_weight is None and row.reference_logprobs is None


def test_transfer_moves_tokens_of_the_acting_prompt_to_their_place_in_the_bare_row():
    rows, _ = filled("behavior", None)
    off = rows[Mode.OFF_POLICY]
    assert TIP_ID not in off.token_ids
    np.testing.assert_allclose(off.denominator_logprobs, [0, 0, -0.25, -0.25, 0, 0, -0.5])


@pytest.mark.parametrize("denominator", ["student", "behavior"])
@pytest.mark.parametrize("cap", [1.05, 2.0])
def test_rollout_weight_is_capped_and_under_the_acting_prompt_in_every_mode(denominator: str, cap: float):
    rows, _ = filled(denominator, cap)
    behavior = np.array([-0.1, -0.11, -0.2], np.float32)
    for row, per_token in zip(rows, (BARE, TIPPED, TIPPED), strict=True):
        gap = per_token * np.array([1, 1, 2]) - behavior
        assert row.rollout_weight is not None
        np.testing.assert_allclose(row.rollout_weight[row.loss_mask], np.minimum(cap, np.exp(gap)), rtol=1e-5)
        assert (row.rollout_weight[~row.loss_mask] == 1).all()


def test_correction_cap_is_reached_where_the_trainer_finds_a_token_likelier():
    actor = make_episode([[5, 6]])
    (step,) = actor.steps
    actor = dataclasses.replace(
        actor, steps=(dataclasses.replace(step, behavior_logprobs=np.array([-1.5, -3.0], np.float32)),)
    )
    rows, _ = fill(build_rows([actor], [1.0]), [actor], score, denominator="student", correction_cap=2.0)
    assert rows[0].rollout_weight is not None
    np.testing.assert_allclose(rows[0].rollout_weight[rows[0].loss_mask], [np.exp(0.5), 2.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("denominator", "cap", "passes"), [("student", None, 1), ("behavior", None, 2), ("student", 2.0, 2)]
)
def test_acting_prompts_are_scored_only_when_needed(denominator: str, cap: float | None, passes: int):
    calls: list[int] = []

    def counted(rows: Sequence[Row]) -> list[np.ndarray]:
        calls.append(len(rows))
        return score(rows)

    rows = build_rows(episodes(), [1.0] * 3)
    fill(rows, episodes(), counted, denominator=denominator, correction_cap=cap)
    assert calls == [3, 1][:passes]


def test_reference_is_its_own_ledger_under_the_loss_prompt():
    rows, _ = filled("behavior", None, reference=lambda rows: [value * 3 for value in score(rows)])
    for row, value in zip(rows, (BARE, TIPPED, BARE), strict=True):
        assert actions(row, row.reference_logprobs) == [3 * value, 3 * value, 6 * value]


def test_gaps_keep_numerics_and_tips_apart():
    _, metrics = filled("student", None)
    plain = np.array([-0.1 + 1.0, -0.11 + 1.0, -0.2 + 2.0])
    memory = np.array([-0.1 + 0.25, -0.11 + 0.25, -0.2 + 0.5])
    same = np.concatenate([plain, memory])
    assert metrics["mismatch/kl"] == pytest.approx(same.mean())
    assert metrics["mismatch/logprob_abs_diff"] == pytest.approx(np.abs(same).mean())
    assert metrics["mismatch/logprob_abs_diff_max"] == pytest.approx(1.8)
    assert metrics["empo2/off/kl_tips_vs_bare"] == pytest.approx(plain.mean())
    weights = np.exp(-plain)  # without tips over with tips
    assert metrics["empo2/off/bare_ratio"] == pytest.approx(weights.mean())
    assert metrics["empo2/off/bare_ess"] == pytest.approx(weights.sum() ** 2 / (3 * (weights**2).sum()))


@pytest.mark.parametrize("cap", [2.0, None])
def test_older_weights_are_corrected_by_the_engine_s_log_probs_and_are_no_gap(cap: float | None):
    behavior = np.array([-1.5, -3.0], np.float32)
    fresh, old = (dataclasses.replace(make_episode([[5, 6]]), policy_version=version) for version in (4, 3))
    (step,) = old.steps
    old = dataclasses.replace(old, steps=(dataclasses.replace(step, behavior_logprobs=behavior),))
    episodes = [fresh, old]
    rows, metrics = fill(
        build_rows(episodes, [1.0, 1.0]), episodes, score, denominator="student", correction_cap=cap, policy_version=4
    )
    # The trainer finds -1 for both tokens: the ratio of the update begins at 1, what came before is in the weight.
    assert actions(rows[1], rows[1].denominator_logprobs) == [BARE, BARE]
    assert metrics["staleness/kl"] == pytest.approx((-0.5 - 2.0) / 2)
    assert metrics["staleness/logprob_abs_diff"] == pytest.approx((0.5 + 2.0) / 2)
    assert metrics["mismatch/logprob_abs_diff"] == pytest.approx((0.9 + 0.89) / 2), "of the fresh episode alone"
    if cap is None:
        assert rows[1].rollout_weight is None and "staleness/capped" not in metrics
    else:
        assert rows[1].rollout_weight is not None
        np.testing.assert_allclose(rows[1].rollout_weight[rows[1].loss_mask], [np.exp(0.5), 2.0], rtol=1e-6)
        assert metrics["staleness/capped"] == 0.5


@pytest.mark.parametrize("denominator", ["student", "behavior"])
def test_what_older_weights_sampled_with_tips_is_no_measure_of_the_tips(denominator: str):
    """Behind are all three modes; without the acting prompt's log-probs nothing tells tips from older weights."""
    _, metrics = filled(denominator, None, policy_version=make_episode().policy_version + 1)
    assert not [name for name in metrics if name.startswith("mismatch")]
    behavior = np.array([-0.1, -0.11, -0.2])
    under = [(BARE, TIPPED)[mode != Mode.ON_POLICY] * np.array([1, 1, 2]) for mode in Mode]
    known = under if denominator == "behavior" else under[: Mode.OFF_POLICY]
    assert metrics["staleness/kl"] == pytest.approx(np.mean([behavior - values for values in known]))
    if denominator == "student":
        assert "empo2/off/kl_tips_vs_bare" not in metrics
    else:
        assert metrics["empo2/off/kl_tips_vs_bare"] == pytest.approx((TIPPED - BARE) * np.mean([1, 1, 2]))
