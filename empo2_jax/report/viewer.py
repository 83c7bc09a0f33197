"""What the episode viewer gets: recorded episodes within a budget, as JSON that is safe inside a script element."""

import json
from collections.abc import Mapping, Sequence

from empo2_jax.metrics import Record
from empo2_jax.report.parts import spread

EPISODE_BYTES = 8_000_000  # of episodes in the page, as they stand in it; the rest stays in the run directory
ITERATIONS = 40


def wanted(iterations: Sequence[int]) -> list[int]:
    """The iterations whose episodes are shown, evenly spread."""
    return spread(iterations, ITERATIONS)


def texts(iteration: int, episodes: Sequence[Record]) -> list[str]:
    """Episodes as JSON with their iteration: the first ones, as many as an iteration may bring at most.

    They are safe inside a script element: no `<`, `>`, `&` or line separator is in them.
    """
    made: list[str] = []
    left = EPISODE_BYTES // 4
    for episode in episodes:
        text = json.dumps({"iteration": iteration, **episode}, ensure_ascii=False, separators=(",", ":"))
        made.append(_safe(text))
        left -= _size(made[-1])
        if left < 0:
            break
    return made


def choose(by_iteration: Mapping[int, Sequence[str]], budget: int = EPISODE_BYTES) -> list[str]:
    """Episodes within `budget` bytes, by iteration: the first of every one, then the second, and so on."""
    counts, used = dict.fromkeys(by_iteration, 0), 0
    for rank in range(max(map(len, by_iteration.values()), default=0)):
        for iteration, episodes in by_iteration.items():
            if rank < len(episodes):
                used += _size(episodes[rank])
                if used > budget:
                    return _first(by_iteration, counts)
                counts[iteration] += 1
    return _first(by_iteration, counts)


def embed(texts: Sequence[str]) -> str:
    """A JSON list of what `texts` made, as safe as they are."""
    return f"[{','.join(texts)}]"


def _safe(text: str) -> str:
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _size(text: str) -> int:
    """Bytes on the page."""
    return len(text.encode())


def _first(by_iteration: Mapping[int, Sequence[str]], counts: Mapping[int, int]) -> list[str]:
    return [text for iteration in sorted(by_iteration) for text in by_iteration[iteration][: counts[iteration]]]
