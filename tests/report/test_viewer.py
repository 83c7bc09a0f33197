"""Which episodes the viewer gets, and that their text cannot leave its script element."""

import json

from empo2_jax.report.viewer import EPISODE_BYTES, ITERATIONS, choose, embed, texts, wanted

ATTACK = "</script><script>alert(1)</script><b>&amp;"


def test_embedded_json_is_the_same_value() -> None:
    values = [{"text": f"{ATTACK} \u2028 é"}, {"n": 1}]
    text = embed(texts(7, values))
    assert json.loads(text) == [{"iteration": 7, **value} for value in values]
    assert not set("<>&\u2028") & set(text)


def test_every_iteration_has_its_first_episodes_before_any_has_more() -> None:
    episodes = {1: ["a1", "b1", "c1"], 2: ["d2", "e2"]}
    assert choose(episodes) == ["a1", "b1", "c1", "d2", "e2"]
    assert choose(episodes, 6) == choose(episodes, 7) == ["a1", "b1", "d2"]
    assert choose({}) == []
    assert choose({1: ["é"], 2: ["e"]}, 2) == ["é"]  # bytes, not characters


def test_an_iteration_brings_at_least_one_episode_and_at_most_its_part() -> None:
    small, large = {"id": "a"}, {"id": "a" * (EPISODE_BYTES // 4)}
    assert texts(7, [small, small]) == ['{"iteration":7,"id":"a"}'] * 2
    assert len(texts(7, [large, small])) == 1
    assert len(texts(7, [small, large, small])) == 2


def test_iterations_are_spread_evenly_with_the_first_and_the_last() -> None:
    assert wanted([3, 4, 9]) == [3, 4, 9]
    chosen = wanted(list(range(1, 501)))
    assert len(chosen) == ITERATIONS and chosen[0] == 1 and chosen[-1] == 500
