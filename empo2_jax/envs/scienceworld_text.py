"""What ScienceWorld says to the policy, in our own words: turns, the request for a tip, tips by rule.

Kept short: a small model reads every token of it. Pure text, no simulator.
"""

import re
from collections.abc import Sequence

MAX_SCORE = 100.0

_REFUSALS = ("No known action matches", "Unknown action.", "Ambiguous request")
_ACTION_FORMS = (
    "look around, look in X, inventory, open X, close X, go to X, pick up X, put down X, move X to Y, pour X in Y, "
    "mix X, use X on Y, activate X, deactivate X, connect X to Y, read X, focus on X, wait"
)
_JAVA_EXCEPTION = re.compile(r"\b(?:java|scala|scienceworld)\.[\w.$]*(?:Exception|Error)\b|\bException in thread\b")


def refused(reply: str) -> bool:
    """Whether the simulator did not take the action (a request for a number to choose by counts as taken)."""
    return reply.startswith(_REFUSALS[:2])


def crashed(reply: str) -> bool:
    """Whether the reply is a Java exception: the simulator failed, the -100 points beside it are no reward."""
    return _JAVA_EXCEPTION.search(reply) is not None


def compact(observation: str) -> str:
    """The observation with its indented lists on one line each, which saves a third of the tokens."""
    text = re.sub(r":\s*\n\t", ": ", observation.strip())
    return re.sub(r"\n\s*\n", "\n", re.sub(r"\n\t", "; ", text))


def asks(reply: str) -> bool:
    """Whether the simulator wants a number to choose a reading by."""
    return reply.startswith(_REFUSALS[2])


def example(goal: str, actions: Sequence[str]) -> str:
    """One solved problem: its goal and the actions, without the replies, which would take most of the tokens."""
    return f"Solved before: {goal}\nActions: {'; '.join(actions)}\n"


def first_turn(goal: str, observation: str, teleport: bool, examples: str = "") -> str:
    """Instruction, solved examples if any, goal and where the agent stands."""
    forms = _ACTION_FORMS + (", teleport to X" if teleport else "")
    return (
        "You act in a text world. Each turn, answer with one action and nothing else.\n"
        f"Actions: {forms}.\n{examples}Task: {goal}\n{compact(observation)}"
    )


def next_turn(observation: str) -> str:
    """The simulator's reply to the last action."""
    return compact(observation)


def tip_request(observation: str, score: float) -> str:
    """The reply to the last action, and the request for one tip."""
    return (
        f"{compact(observation)}\nThe episode is over with a score of {score:g} out of 100. Write one tip for the next "
        "attempt: one sentence on one line, under 100 words, saying what happened, what you learned and how far the "
        "task was from completion."
    )


def scripted_tip(steps: Sequence[tuple[str, str]], score: float) -> str:
    """A truthful sentence from (action, reply) pairs and the final score; "" without steps."""
    if not steps:
        return ""
    taken = [action for action, reply in steps if _telling(action, reply)]
    failed = [action for action, reply in steps if action and reply.startswith(_REFUSALS)]
    ending = f"the task ended {'complete' if score >= MAX_SCORE else 'incomplete'} with score {score:g} of 100"
    if score < 0:
        return _sentence(f'"{steps[-1][0]}" was wrong and ended the episode at once', "focus on something else", ending)
    worked = f"these actions worked: {_join(taken[-4:])}" if taken else "no action changed anything"
    if score >= MAX_SCORE:
        return _sentence(worked, "do the same again", ending)
    lesson = f"these were not understood: {_join(failed[-2:])}" if failed else "more steps are needed after them"
    return _sentence(worked, lesson, ending)


def _telling(action: str, reply: str) -> bool:
    idle = action.startswith(("look", "inventory", "wait", "task")) or "already" in reply
    return not idle and not reply.startswith((*_REFUSALS, "It's not clear"))


def _join(actions: Sequence[str]) -> str:
    return ", ".join(f'"{action}"' for action in dict.fromkeys(action[:60] for action in actions))


def _sentence(*clauses: str) -> str:
    text = "; ".join(clauses)
    return " ".join(f"{text[0].upper()}{text[1:]}.".split())
