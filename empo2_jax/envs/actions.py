"""From free text to an action of a text world: exact form, then the world's own parser.

Nothing is corrected by similarity: an impossible `focus on X` turned into the nearest possible one ends the episode
with -100 points, while the world itself answers "no known action" for 0 points. `most_similar` is the correction of
the released code, for comparisons. Pure text: this module knows no simulator.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

How = Literal["exact", "engine", "similar", "invalid"]

FORBIDDEN = ("reset task",)  # meta commands of a simulator that would undo an episode
MAX_LENGTH = 200  # characters; the longest real actions have about 90

_SPACES = re.compile(r"[\s\x00-\x1f\x7f]+")
_EDGES = " \"'`.,;:!?*<>"


class Resolution(NamedTuple):
    """The text to send to the world ("" if nothing may be sent) and how it was found."""

    action: str
    how: How


def normalize(text: str) -> str:
    """First non-empty line in lower case, single spaces, without quotes and punctuation at the ends."""
    line = next((line for line in text.splitlines() if line.strip(_EDGES)), "")
    return _SPACES.sub(" ", line[: 2 * MAX_LENGTH].lower()).strip(_EDGES)[:MAX_LENGTH].strip(_EDGES)


def resolve(text: str, templates: Sequence[str]) -> Resolution:
    """What to send for `text`, before the world was asked.

    `templates` are the world's action forms with OBJ for an object, for example "move OBJ to OBJ". A text of such a
    form is "exact"; other text is left to the world's own parser ("engine"); empty and forbidden text is "invalid".
    """
    action = normalize(text)
    if not action or action.split()[0] in {forbidden.split()[0] for forbidden in FORBIDDEN}:
        return Resolution("", "invalid")
    return Resolution(action, "exact" if any(fits(action, template) for template in templates) else "engine")


def fits(action: str, template: str) -> bool:
    """Whether `action` has the form of `template`, each OBJ filled with some words."""
    pattern = r"\S.*".join(re.escape(part) for part in template.split("OBJ"))
    return re.fullmatch(pattern, action) is not None


def most_similar(action: str, candidates: Sequence[str]) -> tuple[float, str]:
    """Jaccard index of the words and text of the candidate most like `action`, whatever its verb; (0, "") if none is.

    Ties go to the first in alphabetical order.
    """
    words = set(action.split())
    best = (0.0, "")
    for candidate in sorted(candidates):
        other = set(candidate.split())
        index = len(words & other) / len(words | other)
        if index > best[0]:
            best = (index, candidate)
    return best
