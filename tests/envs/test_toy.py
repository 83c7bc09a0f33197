"""The toy world: its rules and points, its secrets, its prompts' closed vocabulary, and its demonstrations."""

import re

import pytest

from empo2_jax.envs import toy
from empo2_jax.errors import ConfigError, EnvError
from empo2_jax.prompts import tip_entry, tips_block
from empo2_jax.types import Message, Task
from tests.fixtures.worlds import word_tokenizer


def house(number: int = 0) -> toy.ToyHouse:
    world = toy.ToyHouse()
    world.reset(Task("toy", "bulb", number), 0)
    return world


@pytest.mark.parametrize("number", range(8))
def test_bulb_is_worth_30_points_and_the_lamp_70(number: int):
    world = house(number)
    place, room = toy.SECRETS[number]
    wrong = next(other for other in toy.ROOMS if other != room)
    found = world.step(f"look in the {place}")
    assert (found.text, found.reward, found.score, found.done) == (f"the bulb was in the {place} .", 30, 30, False)
    dark = world.step(f"try the {wrong}")
    assert (dark.text, dark.reward, dark.score, dark.done) == (f"the {wrong} stays dark .", 0, 30, False)
    lit = world.step(f"try the {room}")
    assert (lit.reward, lit.score, lit.done, lit.success) == (70, 100, True, True)
    assert world.admissible_actions() == []
    with pytest.raises(EnvError, match="reset first"):
        world.step("try the hall")


def test_empty_place_and_impossible_action_change_nothing():
    world = house()
    empty = world.step("look in the drawer")
    assert (empty.text, empty.reward, empty.resolution) == ("the drawer is empty .", 0.0, "exact")
    for text in ("try the hall", "look in the hall", "open the drawer", "", "look in the drawer drawer"):
        nothing = world.step(text)
        assert (nothing.text, nothing.resolution, nothing.resolved) == ("nothing happens .", "invalid", "")
        assert (nothing.score, nothing.done) == (0.0, False)
    assert world.facts == ["the bulb is not in the drawer ."]


@pytest.mark.parametrize("text", ["look in the vase", "Look  in the VASE.", " look, in the vase !"])
def test_free_text_is_read_without_case_and_signs(text: str):
    assert house().step(text).resolved == "look in the vase"


def test_admissible_actions_are_places_then_rooms():
    world = house()
    assert world.admissible_actions() == sorted(f"look in the {place}" for place in toy.PLACES)
    world.step(f"look in the {toy.SECRETS[0][0]}")
    assert world.admissible_actions() == sorted(f"try the {room}" for room in toy.ROOMS)


def test_secrets_are_distinct_and_never_where_common_sense_looks():
    assert len(set(toy.SECRETS)) == len({place for place, _ in toy.SECRETS}) == 8
    assert all(place in toy.PLACES and room in toy.ROOMS for place, room in toy.SECRETS)
    for name, (place, room) in zip(toy.HOUSES, toy.SECRETS, strict=True):
        places, rooms = toy.usual(name)
        assert (len(set(places)), len(set(rooms))) == (4, 2)
        assert place not in places and room not in rooms
    assert len({tuple(toy.usual(name)[0]) for name in toy.HOUSES}) == 8


@pytest.mark.parametrize("task", [Task("toy", "bulb", 8), Task("toy", "bulb", -1), Task("toy", "lamp", 0)])
def test_unknown_task_is_refused(task: Task):
    with pytest.raises(EnvError, match="variations 0 to 7"):
        toy.ToyHouse().reset(task, 0)


def test_family_is_configured_by_name_and_count():
    assert toy.family(variations=3).tasks("test") == [Task("toy", "bulb", number) for number in range(3)]
    with pytest.raises(ConfigError, match="nearest is 'bulb'"):
        toy.family(tasks=["bulbs"])
    with pytest.raises(ConfigError, match="1 to 8 houses"):
        toy.family(variations=9)


def everything_said() -> list[str]:
    """All texts of the world, its prompts, tips and demonstrations."""
    family, texts = toy.family(), []
    for number, (place, room) in enumerate(toy.SECRETS):
        world = house(number)
        start = world.reset(Task("toy", "bulb", number), 0)
        actions = ["wait", *world.admissible_actions(), f"look in the {place}"]
        actions += [f"try the {other}" for other in toy.ROOMS if other != room] + [f"try the {room}"]
        views = [world.step(action) for action in actions if not world.done and "nothing" not in action]
        texts += [family.first_turn(world.goal, start.text), *actions[1:]]
        texts += [family.next_turn(view.text) for view in views]
        texts += [family.tip_request(view.text, view.score) for view in views]
        tip = family.scripted_tip(world.goal, [("", view.text) for view in views], world.score)
        texts += [tips_block([tip_entry(tip, action, score) for action in actions[1:] for score in (0.0, 30.0, 100.0)])]
    texts += [family.scripted_tip("", [], 0.0), tips_block([tip_entry("nothing .", "", 0.0)])]
    return texts + [message.content for chat in family.demonstrations("train", 60, 0) for message in chat]


def test_vocabulary_covers_every_text():
    tokenizer = word_tokenizer()
    unknown = tokenizer.encode("[UNK]")[0]
    assert tokenizer.encode("zebra") == [unknown]
    texts = everything_said()
    assert len(texts) > 400
    assert not [text for text in texts if unknown in tokenizer.encode(text)]
    chat = tokenizer.chat_text([Message("user", texts[0]), Message("assistant", texts[1])], True)
    assert unknown not in tokenizer.encode(chat)


def test_words_read_back_as_they_were_written():
    for text in toy.family().demonstrations("train", 6, 0)[0]:
        flat = " ".join(re.findall(r"\w+|[^\w\s]", text.content.lower()))
        assert word_tokenizer().decode(word_tokenizer().encode(text.content)) == flat


def test_demonstrations_are_valid_episodes_that_end_with_their_facts():
    family = toy.family()
    chats = family.demonstrations("train", 120, 1)
    assert len(chats) == 120
    assert chats == family.demonstrations("train", 120, 1) != family.demonstrations("train", 120, 2)
    assert chats[:7] == family.demonstrations("train", 7, 1)
    for chat in chats:
        assert [message.role for message in chat] == ["user", "assistant"] * (len(chat) // 2)
        *actions, tip = [message.content for message in chat[1::2]]
        assert 2 <= len(actions) <= 3
        views = [message.content for message in chat[2::2]]
        assert not [view for view in views if "nothing happens" in view]
        assert tip == family.scripted_tip("", list(zip(actions, views, strict=True)), 0.0)


def test_demonstrations_follow_common_sense_without_tips_and_tips_where_they_stand():
    chats = toy.family().demonstrations("train", 300, 2)
    bare = [chat for chat in chats if "Tips" not in chat[0].content]
    houses = [re.search(r"of the (\w+) house", chat[0].content) for chat in bare]
    first = [chat[1].content.split()[-1] for chat in bare]
    usual = [place in toy.usual(house[1])[0] for house, place in zip(houses, first, strict=True) if house]
    assert len(usual) == len(bare) > 40 and sum(usual) >= 0.95 * len(usual)
    told = 0
    for chat in chats:
        if "Tips" in chat[0].content and (fact := re.search(r"the bulb is in the (\w+)", chat[0].content)):
            told += 1
            assert chat[1].content == f"look in the {fact[1]}"
    assert told > 0
