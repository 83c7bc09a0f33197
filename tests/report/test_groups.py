"""Phantom groups among recorded ones."""

from empo2_jax.report.groups import phantoms, section
from tests.fixtures.recorded import episode, step


def group(number: int, returns: list[float], novelty: list[float], **changes: object) -> list[dict]:
    return [
        episode(f"i3/g{number}/e{member}", score=value, steps=[step(novelty=paid)], **changes)
        for member, (value, paid) in enumerate(zip(returns, novelty, strict=True))
    ]


def test_equal_returns_with_unequal_novelty_are_phantoms() -> None:
    episodes = [
        *group(0, [30.0, 30.0], [0.5, 2.0]),
        *group(1, [30.0, 40.0], [0.5, 2.0]),  # the world tells them apart
        *group(2, [30.0, 30.0], [0.5, 0.5]),  # nothing does
    ]
    (found,) = phantoms(4, episodes, 2)
    assert (found.group, found.iteration, found.members) == ("i3/g0", 4, 2)
    assert (found.extrinsic, found.lowest, found.highest) == (30.0, 0.5, 2.0)


def test_parts_of_groups_and_failed_members_are_no_phantoms() -> None:
    assert not phantoms(4, group(0, [30.0, 30.0], [0.5, 2.0]), 3)  # the third may differ
    failed = group(0, [30.0, 30.0], [0.5, 2.0])
    failed[1]["stop_reason"] = "engine_error"
    assert not phantoms(4, failed, 2)
    three = [*group(0, [30.0, 30.0], [0.5, 2.0]), episode("i3/g0/e2", score=99.0, stop_reason="env_error")]
    assert [found.members for found in phantoms(4, three, 3)] == [2]


def test_the_section_lists_the_newest_first_or_says_why_not() -> None:
    found = phantoms(4, group(0, [30.0, 30.0], [0.5, 2.0]), 2) + phantoms(7, group(1, [1.0, 1.0], [0.5, 1.0]), 2)
    (table,) = section(found).tables
    assert [row[1:] for row in table.rows] == [
        ["7", "toy/lamp/0", "2", "1", "0.5 … 1"],
        ["4", "toy/lamp/0", "2", "30", "0.5 … 2"],
    ]
    assert table.rows[0][0].search == "i3/g1/"
    assert section([]).missing == ["No recorded group is one."]
    assert section([], "nobody knows").missing[0].startswith("The groups are not listed: nobody knows; ")
