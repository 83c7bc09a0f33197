from hypothesis import given
from hypothesis import strategies as st

from empo2_jax.envs import actions

TEMPLATES = ["focus on OBJ", "go OBJ", "look around", "move OBJ to OBJ", "reset task"]


def test_normalize_by_hand():
    assert actions.normalize('\n  "Focus  on\tthe Orange."\nThen move it.') == "focus on the orange"
    assert actions.normalize("Open door to kitchen!!") == "open door to kitchen"
    assert actions.normalize("...\n\n") == ""
    assert len(actions.normalize("a" * 100_000)) == actions.MAX_LENGTH


@given(st.text(max_size=400))
def test_normalize_is_idempotent_and_clean(text):
    once = actions.normalize(text)
    assert actions.normalize(once) == once
    assert "\n" not in once
    assert "\x00" not in once


def test_templates_decide_exact_or_engine():
    assert actions.resolve("Go to kitchen.", TEMPLATES) == ("go to kitchen", "exact")
    assert actions.resolve("move orange to box", TEMPLATES) == ("move orange to box", "exact")
    assert actions.resolve("examine orange", TEMPLATES) == ("examine orange", "engine")
    assert actions.resolve("go", TEMPLATES).how == "engine"


def test_reset_task_is_never_sent():
    for text in ("reset task", " Reset   Task.", "'reset task'", "reset\ttask now", "reset"):
        assert actions.resolve(text, TEMPLATES) == ("", "invalid")


def test_released_code_would_correct_focus():
    ratio, nearest = actions.most_similar("focus on oranges", ["go to kitchen", "focus on orange"])
    assert nearest == "focus on orange"
    assert ratio == 2 / 4  # focus, on of focus, on, orange, oranges
    assert actions.most_similar("x", []) == (0.0, "")


def test_corrections_are_for_harmless_verbs_and_a_clear_nearest_action():
    valid = ["open door to kitchen", "open door to hallway", "look at orange", "focus on orange", "eat orange"]
    assert actions.correction("open door to kitchn", valid) == "open door to kitchen"
    assert actions.correction("look at orenge", valid) == "look at orange"
    assert actions.correction("focus on orenge", valid) == ""
    assert actions.correction("eat orenge", valid) == ""
    assert actions.correction("open door to", valid) == ""  # as near to one as to the other, and below the cut-off
    assert actions.correction("look at elephants", valid) == ""
    assert actions.correction("open box 1", ["open box 2", "open box 3"]) == ""  # no clear nearest one


def test_choices_by_hand():
    reply = "Ambiguous request: Please enter the number:\n0:\topen door to kitchen\n1:\topen door to Hallway\n"
    offered = actions.options(reply)
    assert offered == {"0": "open door to kitchen", "1": "open door to hallway"}
    assert actions.chosen("1", offered) == "1"
    assert actions.chosen("2", offered) == ""
    assert actions.chosen("open door to hallway", offered) == "1"
    assert actions.settled("open door", offered) == ""
    alike = {"0": "pick up seed", "1": "pick up seed"}
    assert actions.settled("pick up seed", alike) == "0"
    assert actions.settled("focus on seed", alike) == ""
    assert actions.options("You see: \n\ta door") == {}
