"""Which episodes the viewer gets, and that their text cannot leave its script element."""

import json

from empo2_jax.report.viewer import ITERATIONS, choose, embed_json, wanted

ATTACK = "</script><script>alert(1)</script><b>&amp;"


def test_embedded_json_is_the_same_value() -> None:
    value = {"text": f"{ATTACK} \u2028 é"}
    text = embed_json(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028") & set(text)


def test_every_iteration_has_its_first_episodes_before_any_has_more() -> None:
    episodes = {1: [{"id": "a"}, {"id": "b"}, {"id": "c"}], 2: [{"id": "d"}, {"id": "e"}]}
    whole = choose(episodes)
    assert [(record["iteration"], record["id"]) for record in whole] == [
        (1, "a"),
        (1, "b"),
        (1, "c"),
        (2, "d"),
        (2, "e"),
    ]
    size = len(json.dumps(whole[0]))
    assert [record["id"] for record in choose(episodes, 3 * size)] == ["a", "b", "d"]
    assert choose({}) == []


def test_iterations_are_spread_evenly_with_the_first_and_the_last() -> None:
    assert wanted([3, 4, 9]) == [3, 4, 9]
    chosen = wanted(list(range(1, 501)))
    assert len(chosen) == ITERATIONS and chosen[0] == 1 and chosen[-1] == 500
