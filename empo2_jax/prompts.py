"""The method's own texts, the same in every environment: a memory entry and the block of tips in a user turn.

What an environment says (first turn, next turn, request for a tip) stands in its own file.
"""

from collections.abc import Sequence

_HEADING = "\n\nTips from earlier episodes , best first :\n"


def tip_entry(tip: str, action: str, score: float) -> str:
    """Content of a memory entry: the tip, the action taken at its step and the episode's final score out of 100."""
    return f"{tip} (action : {action} ; score : {score:.0f} )"


def tip_of(entry: str) -> str:
    """The tip in the content of a memory entry, without the action and the score of its step."""
    return entry.rpartition(" (action : ")[0] or entry


def tips_block(tips: Sequence[str]) -> str:
    """Text appended to the user turn at which the tips were retrieved; "" without tips."""
    return _HEADING + "\n".join(f"- {tip}" for tip in tips) if tips else ""


def without_tips(turn: str) -> str:
    """The user turn before the block of tips was appended."""
    return turn.partition(_HEADING)[0]
