"""What the episode viewer gets: recorded episodes within a budget, as JSON that is safe inside a script element."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from empo2_jax.metrics import Record
from empo2_jax.report.parts import spread

EPISODE_BYTES = 8_000_000  # of episodes embedded in the page; the rest stays in the run directory
ITERATIONS = 40


def wanted(iterations: Sequence[int]) -> list[int]:
    """The iterations whose episodes are shown, evenly spread."""
    return spread(iterations, ITERATIONS)


def choose(by_iteration: Mapping[int, Sequence[Record]], budget: int = EPISODE_BYTES) -> list[Record]:
    """Episodes within `budget` characters, by iteration: the first of every one, then the second, and so on."""
    shown, used = [], 0
    for rank in range(max(map(len, by_iteration.values()), default=0)):
        for iteration, episodes in by_iteration.items():
            if rank < len(episodes):
                record = {"iteration": iteration, **episodes[rank]}
                used += len(json.dumps(record))
                if used > budget:
                    return _ordered(shown)
                shown.append(record)
    return _ordered(shown)


def embed_json(value: Any) -> str:
    """JSON that is safe inside a script element: no `<`, `>`, `&` or line separator stands in it as such."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _ordered(episodes: list[Record]) -> list[Record]:
    return sorted(episodes, key=lambda record: record["iteration"])
