"""From free text to an action of a text world: exact form, then the world's own parser, then a cautious correction.

What the world refuses is corrected by similarity for harmless verbs only, above a cut-off and to a single nearest
action: an impossible `focus on X` turned into the nearest possible one ends the episode with -100 points, while the
world itself answers "no known action" for 0 points. When the world asks which of several readings is meant, readings
that look the same are settled here, otherwise the policy is asked; `chosen` finds the number it means.
`most_similar` is the correction of the released code, for comparisons. Pure text: this module knows no simulator.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

How = Literal["exact", "engine", "choice", "similar", "invalid"]

FORBIDDEN = ("reset task",)  # meta commands of a simulator that would undo an episode
MAX_LENGTH = 200  # characters; the longest real actions have about 90

HARMLESS = ("look", "examine", "open", "go", "read")  # verbs that a correction may send
CUTOFF = 0.85  # ratio of equal characters (difflib) from which a text is taken for a misspelled action
MARGIN = 0.02  # by which the nearest action must lead

_OPTION = re.compile(r"^(\d+):\s*(.+?)\s*$", re.MULTILINE)
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


def correction(action: str, candidates: Sequence[str]) -> str:
    """The one candidate that `action` misspells; "" for verbs that are not harmless, or without a clear nearest one."""
    verb = action.partition(" ")[0]
    if verb not in HARMLESS:
        return ""
    matcher, ratios = difflib.SequenceMatcher(autojunk=False), []
    matcher.set_seq2(action)
    for candidate in set(candidates):
        if candidate.partition(" ")[0] == verb:
            matcher.set_seq1(candidate)
            if matcher.real_quick_ratio() >= CUTOFF - MARGIN and matcher.quick_ratio() >= CUTOFF - MARGIN:
                ratios.append((matcher.ratio(), candidate))
    ratios.sort()
    if not ratios or ratios[-1][0] < CUTOFF or (len(ratios) > 1 and ratios[-1][0] - ratios[-2][0] < MARGIN):
        return ""
    return ratios[-1][1]


def options(reply: str) -> dict[str, str]:
    """The readings that a world offers by number, as normalized text; {} if it asks nothing."""
    return {number: normalize(text) for number, text in _OPTION.findall(reply)}


def chosen(action: str, offered: Mapping[str, str]) -> str:
    """The number that `action` means: itself, or that of the only reading with this text; "" if none."""
    if action in offered:
        return action
    numbers = [number for number, text in offered.items() if text == action]
    return numbers[0] if len(numbers) == 1 else ""


def settled(action: str, offered: Mapping[str, str]) -> str:
    """The first number where all readings look the same, so that asking would tell nothing; "" else, or for focus."""
    alike = len(set(offered.values())) == 1
    return next(iter(offered)) if alike and not action.startswith("focus") else ""


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
