"""Gains of tips, computed by hand from recorded groups."""

from empo2_jax.prompts import tip_entry, tip_of
from empo2_jax.report.tip_effects import SHOWN, TipEffects, section
from tests.fixtures.recorded import episode, step


def entry(tip: str, action: str = "look", score: float = 50.0) -> tuple[str, float]:
    return tip_entry(tip, action, score), score


def test_a_tip_is_found_again_in_its_entry() -> None:
    assert tip_of(tip_entry("go left", "open the (red) door", 40.0)) == "go left"
    assert tip_of(tip_entry("copied (action : look ; score : 3 )", "go", 1.0)) == "copied (action : look ; score : 3 )"
    assert tip_of("a reflection") == "a reflection"


def test_gain_is_with_the_tip_less_without_any_within_a_group() -> None:
    effects = TipEffects()
    left, both = [entry("left")], [entry("left", "go"), entry("right")]
    effects.add(
        [
            episode("i0/g0/e0", score=20.0),
            episode("i0/g0/e1", score=40.0),  # 30 without tips
            episode("i0/g0/e2", "OFF_POLICY", 90.0, steps=[step(tips=left), step(tips=left)]),
            episode("i0/g0/e3", "ON_POLICY_WITH_MEMORY", 50.0, steps=[step(tips=both)]),
            episode("i0/g1/e0", score=80.0, task="toy/lamp/0"),
            episode("i0/g1/e1", "OFF_POLICY", 60.0, steps=[step(tips=left)]),
        ]
    )
    left_effect, right_effect = effects.found["toy/lamp/0", "left"], effects.found["toy/lamp/0", "right"]
    # Of three episodes with "left": 90 and 50 against 30 each, 60 against 80.
    assert (left_effect.episodes, left_effect.better, left_effect.worse) == (3, 1, 1)
    assert left_effect.moved == 200.0 - 140.0 and left_effect.gain == 20.0
    assert (right_effect.episodes, right_effect.gain) == (1, 20.0)
    assert [(tip, effect.moved) for _, tip, effect in effects.ranked()] == [("left", 60.0), ("right", 20.0)]


def test_only_members_of_the_same_group_that_acted_without_memory_and_are_valid_count() -> None:
    effects = TipEffects()
    saw = [step(tips=[entry("left")])]
    effects.add(
        [
            episode("i0/g0/e0", "OFF_POLICY", 90.0, steps=saw),
            episode("i0/g0/e1", "OFF_POLICY", 10.0),  # with memory that had nothing to say
            episode("i0/g0/e2", score=0.0, stop_reason="env_error"),
            episode("i0/g1/e0", score=50.0),
        ]
    )
    assert not effects.found
    effects.add([episode("i0/g0/e3", score=70.0), episode("i0/g0/e0", "OFF_POLICY", 90.0, steps=saw)])
    assert effects.found["toy/lamp/0", "left"].gain == 20.0


def test_the_section_says_what_helped_what_hurt_and_how_many_there_are() -> None:
    effects = TipEffects()
    for number in range(SHOWN + 2):
        saw = [step(tips=[entry(f"tip {number}")])]
        effects.add([episode(score=10.0), episode("i0/g0/e1", "OFF_POLICY", 20.0 + number, steps=saw)])
    effects.add([episode(score=10.0), episode("i0/g0/e1", "OFF_POLICY", 4.0, steps=[step(tips=[entry("wrong")])])])
    helped, hurt = section(effects, 36).tables
    assert len(helped.rows) == SHOWN and helped.note == f"The {SHOWN} that moved most, of {SHOWN + 2}."
    assert helped.rows[0][1:] == ["toy/lamp/0", "36.0", "10.0", "+26.0", "1", "1 / 0"]
    assert [row[1:] for row in hurt.rows] == [["toy/lamp/0", "4.0", "10.0", "-6.0", "1", "0 / 1"]]
    assert "Of 18 pairs of a task and a tip seen on it, 17 helped and 1 hurt." in section(effects, 36).about


def test_without_tips_it_says_that_nothing_can_be_compared() -> None:
    (text,) = section(TipEffects(), 12).missing
    assert "Nothing can be compared" in text and "12 episodes were recorded" in text
