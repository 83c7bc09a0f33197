"""What the policy is told in the shop: role, task, page and possible actions; own wording after the paper's pattern.

An answer is a thought and, on its last line, one action. The list of actions stands with every observation.
"""

from collections.abc import Sequence

OPENING = """You are shopping in an online store on behalf of somebody else.
Their wish: {goal}

Find a product that fits the wish in every point, choose its options, and buy it. Buying ends the task: it is scored \
by the kind of product, the wished properties, the chosen options and the price.
In every turn think briefly about what the page tells you, then write exactly one of the possible actions alone on the \
last line.

{observation}"""

TIP_REQUEST = """{observation}

The shopping is over; it was worth {score:.0f} of 100 points. Write one sentence on one line, at most 100 words, that \
would help with this wish next time: what you searched and bought, what fitted or did not, and what to do otherwise."""

NOTHING_HAPPENED = "Nothing happened: the last line of your answer was not one of the possible actions."


def actions_line(clickables: Sequence[str], can_search: bool) -> str:
    """What may be done on a page."""
    actions = ["search[your words]"] if can_search else []
    return "Possible actions: " + ", ".join([*actions, *(f"click[{thing}]" for thing in clickables)])


def scripted_tip(steps: Sequence[tuple[str, str]], score: float) -> str:
    """A truthful sentence by rule from (answer, observation) pairs; "" without steps."""
    if not steps:
        return ""
    actions = [lines[-1].strip() for answer, _ in steps if (lines := answer.strip().splitlines())]
    searches = [action[7:-1] for action in actions if action.startswith("search[")]
    clicks = [action[6:-1] for action in actions if action.startswith("click[")]
    if clicks[-1:] != ["buy now"]:
        return (
            f"Searched for {searches[-1]!r} but bought nothing; buy before the turns run out."
            if searches
            else ("Nothing was searched; begin with search[...] and the main words of the wish.")
        )
    path = ", then ".join(f"click[{click}]" for click in clicks[:-1])
    search = f"Searching for {searches[-1]!r}" if searches else "Buying"
    verdict = "it fits in every point" if score >= 100.0 else "it does not fit in every point; look for another one"
    return f"{search}, then {path}, then buying scored {score:.0f} of 100: {verdict}."
