"""Acting by choosing: at every step the policy proposes several actions and somebody else takes one (Retrospex).

Proposals of a step are samples of the same prompt; equal texts are one. What is kept as the step is the chosen sample
as it came from the engine. How the choice is made is not known here.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from empo2_jax.errors import EngineError
from empo2_jax.rollout.base import Completion
from empo2_jax.rollout.collect import Collector, Live
from empo2_jax.types import Proposals


@runtime_checkable
class Chooser(Protocol):
    """Takes one of several proposals."""

    def choose(self, asked: Sequence[Proposals]) -> list[int]:
        """A place in the answers of each."""
        ...


class ChoosingCollector(Collector):
    """A collector whose actions are chosen among `candidates` samples."""

    def __init__(self, chooser: Chooser, candidates: int, *parts: Any, **settings: Any):
        """`parts` and `settings` are those of `Collector`."""
        super().__init__(*parts, **settings)
        self._chooser, self._candidates = chooser, candidates

    def _sample(self, lives: Sequence[Live], temperature: float) -> list[Completion | EngineError]:
        requests, extra = [], []
        for live in lives:
            first = self._request(live, temperature)
            key = [self._words(live, "candidate", len(live.steps), number) for number in range(1, self._candidates)]
            others = [replace(first, session=f"{first.session}#{n}", key=k) for n, k in enumerate(key, 1)]
            requests += [first, *others]
            extra += others
        completions = self._engine.generate(requests)
        for request in extra:
            self._engine.release(request.session)
        found = [completions[start : start + self._candidates] for start in range(0, len(requests), self._candidates)]
        distinct = [self._distinct(samples) for samples in found]
        asked = [self._proposals(live, samples) for live, samples in zip(lives, distinct, strict=True) if samples]
        chosen = iter(self._chooser.choose(asked))
        return [kept[next(chosen)] if kept else samples[0] for kept, samples in zip(distinct, found, strict=True)]

    def _distinct(self, samples: Sequence[Completion | EngineError]) -> list[Completion]:
        """The first sample of every text, without failures."""
        by_text: dict[str, Completion] = {}
        for sample in samples:
            if isinstance(sample, Completion):
                by_text.setdefault(self._chat.text(sample.ids), sample)
        return list(by_text.values())

    def _proposals(self, live: Live, samples: Sequence[Completion]) -> Proposals:
        assert live.environment is not None and live.observation is not None
        return Proposals(
            goal=live.environment.goal,
            state=live.observation.state,
            step=len(live.steps),
            answers=tuple(self._chat.text(sample.ids) for sample in samples),
            likelihoods=np.array([math.exp(sample.logprobs.mean()) if len(sample.ids) else 0.0 for sample in samples]),
        )
