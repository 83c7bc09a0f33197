"""Groups of recorded episodes, and those whose advantages come from novelty alone (phantom advantages)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from empo2_jax.metrics import Record
from empo2_jax.report.parts import Cell, Section, Table, first_of, text
from empo2_jax.types import StopReason

SHOWN = 100


@dataclass(frozen=True)
class PhantomGroup:
    """Valid members of equal extrinsic return and unequal novelty: their order is that of novelty."""

    iteration: int
    group: str  # as the ids of its members begin
    task: str
    members: int
    extrinsic: float  # points, the same for all
    lowest: float  # novelty, points
    highest: float


def members_by_group(episodes: Sequence[Record]) -> dict[str, list[Record]]:
    """The valid episodes of one iteration by what their ids share."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for episode in episodes:
        if StopReason(episode["stop_reason"]).valid:
            groups[episode["id"].rpartition("/")[0]].append(episode)
    return groups


def phantoms(iteration: int, episodes: Sequence[Record], size: int) -> list[PhantomGroup]:
    """The phantom groups among those whose `size` members are all recorded: a part may be tied by chance."""
    recorded: dict[str, int] = defaultdict(int)
    for episode in episodes:
        recorded[episode["id"].rpartition("/")[0]] += 1
    found = []
    for group, members in members_by_group(episodes).items():
        returns = {round(member["extrinsic_return"], 6) for member in members}
        novelty = [round(member["intrinsic_return"], 6) for member in members]
        if recorded[group] == size and len(members) > 1 and len(returns) == 1 and len(set(novelty)) > 1:
            ends = min(novelty), max(novelty)
            found.append(PhantomGroup(iteration, group, members[0]["task"], len(members), returns.pop(), *ends))
    return found


def section(found: Sequence[PhantomGroup], unknown: str = "") -> Section:
    """The newest phantom groups, or why groups are `unknown`."""
    title = "Phantom advantages"
    if unknown:
        return Section(title, missing=[f"The groups are not listed: {unknown}; their share is in the chart Groups."])
    about = (
        "Groups whose members all have the same return from the world, so that novelty alone decides which episode "
        "counts as better."
    )
    if not found:
        return Section(title, about, missing=["No recorded group is one."])
    newest = sorted(found, key=lambda group: -group.iteration)[:SHOWN]
    rows = [
        [
            Cell(group.group, search=f"{group.group}/"),
            str(group.iteration),
            group.task,
            str(group.members),
            text(group.extrinsic),
            f"{text(group.lowest)} … {text(group.highest)}",
        ]
        for group in newest
    ]
    columns = ["group", "iteration", "task", "valid members", "return of all", "novelty"]
    note = first_of(len(rows), len(found), "Groups", "newest first")
    return Section(title, about, tables=[Table("Groups", note, columns, rows, filtered=True)])
