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
