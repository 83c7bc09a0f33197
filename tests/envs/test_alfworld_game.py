"""ALFWorld's names for things, the forms of commands, and what the player sees: without an engine."""

from empo2_jax.envs.alfworld_game import form, names, view

FACTS = [
    ("atlocation", "agent1", "loc 3"),
    ("receptacleatlocation", "fridge 1", "loc 3"),
    ("receptacleatlocation", "shelf 2", "loc 1"),
    ("openable", "fridge 1"),
    ("inreceptacle", "egg 2", "fridge 1"),
    ("inreceptacle", "cup 1", "fridge 1"),
    ("inreceptacle", "vase 1", "shelf 2"),
]


def test_the_first_of_a_kind_in_alphabetical_order_has_the_last_number():
    identifiers = ["cup_bar_2", "cup_bar_1", "sink_bar_1", "sink_bar_1_bar_sinkbasin", "agent1", "cup_bar_2"]
    assert names(identifiers) == {
        "agent1": "agent1",
        "cup_bar_1": "cup 2",
        "cup_bar_2": "cup 1",
        "sink_bar_1": "sink 1",
        "sink_bar_1_bar_sinkbasin": "sinkbasin 1",
    }


def test_forms_of_commands_have_letters_for_things():
    assert form("take {o} from {r}") == "take X from Y"
    assert form("go to [{r.name | receptacleatlocation(r:receptacle, lend:location)}]") == "go to X"
    assert form("inventory") == "inventory"


def test_what_is_in_a_closed_thing_is_not_seen():
    assert view(FACTS) == "You are at fridge 1, which is closed.\nYou carry nothing."
    assert view([*FACTS, ("opened", "fridge 1")]) == "You are at fridge 1 with cup 1, egg 2.\nYou carry nothing."


def test_what_was_done_to_things_is_seen():
    held = [("holds", "agent1", "egg 1"), ("ishot", "egg 1"), ("isclean", "egg 1"), ("iscool", "egg 2")]
    assert view([*FACTS, ("opened", "fridge 1"), *held]).startswith("You are at fridge 1 with cup 1, egg 2 (cool).\n")
    assert view([*FACTS[1:], ("atlocation", "agent1", "loc 9"), *held]) == (
        "You are in the middle of the room.\nYou carry egg 1 (clean, hot)."
    )
