"""Tips: after an episode the policy is asked for one line of advice to itself (paper section 4.1 and appendix).

The request is one more user turn on the prompt that acted, or where tips stand in the newest turn alone on the prompt
without them: the engine still holds most of its cache. Tips are sampled at the training temperature and are never
trained on.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from empo2_jax.config import MemoryConfig
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.errors import EngineError
from empo2_jax.randomness import words
from empo2_jax.rollout.base import Engine, Request, Sampling
from empo2_jax.rollout.chat import Chat

if TYPE_CHECKING:
    from empo2_jax.rollout.collect import Live


@runtime_checkable
class TipWriter(Protocol):
    """Fills `tip`, `tip_tokens` and `tip_prompt_tokens` of finished episodes."""

    def write(self, engine: Engine, lives: Sequence["Live"]) -> None:
        """Write one tip per episode; an engine failure leaves it empty."""
        ...


class PolicyTipWriter:
    """The policy itself writes, as in the paper."""

    def __init__(
        self,
        chat: Chat,
        family: EnvironmentFamily,
        memory: MemoryConfig,
        *,
        temperature: float,
        seed: int,
        banned_from: int,
    ):
        self._chat, self._family, self._seed = chat, family, seed
        self._placement = memory.placement
        self._sampling = Sampling(memory.tip_max_tokens, temperature, chat.stop_ids, banned_from=banned_from)

    def write(self, engine: Engine, lives: Sequence["Live"]) -> None:
        """Sample all tips in one call."""
        requests = [request for live in lives if (request := self._request(engine, live)) is not None]
        try:
            completions = engine.generate(requests) if requests else []
        except EngineError:
            return
        by_session = {live.assignment.id: live for live in lives}
        for request, completion in zip(requests, completions, strict=True):
            if isinstance(completion, EngineError):
                continue
            live = by_session[request.session]
            live.tip = one_line(self._chat.text(completion.ids))
            live.tip_tokens = len(completion.ids)
            live.tip_prompt_tokens = len(request.prompt_ids) - completion.cached_tokens

    def _request(self, engine: Engine, live: "Live") -> Request | None:
        assert live.observation is not None
        last = live.steps[-1]
        turn = self._family.tip_request(live.observation.text, live.observation.score)
        past = last.prompt_ids if self._placement == "history" else last.bare_prompt_ids
        prompt = np.concatenate([past, last.action_ids, self._chat.following(last.action_ids, turn)])
        if len(prompt) + self._sampling.max_tokens > engine.max_length:
            return None
        return Request(live.assignment.id, prompt, words(self._seed, "tip", live.assignment.id), self._sampling)


class AfterFailure:
    """Another writer's tips, but none after a success (Reflexion)."""

    def __init__(self, writer: TipWriter):
        self._writer = writer

    def write(self, engine: Engine, lives: Sequence["Live"]) -> None:
        """One tip per failed episode."""
        self._writer.write(engine, [live for live in lives if live.observation and not live.observation.success])


class ScriptedTipWriter:
    """Facts by rule, for tests and as a named option of the toy world; not part of the method."""

    def __init__(self, family: EnvironmentFamily):
        self._family = family

    def write(self, engine: Engine, lives: Sequence["Live"]) -> None:
        """Ask the environment's rule; the engine is not used."""
        for live in lives:
            assert live.observation is not None
            texts = [step.observation for step in live.steps[1:]] + [live.observation.text]
            steps = list(zip([step.resolved for step in live.steps], texts, strict=True))
            live.tip = self._family.scripted_tip(live.goal, steps, live.observation.score)


def one_line(text: str) -> str:
    """First non-empty line of sampled text, spaces collapsed."""
    return next((" ".join(line.split()) for line in text.splitlines() if line.strip()), "")
