"""Collecting episodes: retrieve tips, render, generate, step; all episodes of a wave move together.

A wave holds at most as many episodes as the engine has slots, in the order of the assignments, so what is batched with
what is a function of the configuration and never of arrival times. The prompt without tips is an append-only sequence;
so is the one with tips where they stay in their turns (paper section 4.2), or it is the former with tips in the newest
turn (`memory.placement`). Nothing is ever cut out of a prompt. This module writes no tips (`reflect`) and computes no
learning signal.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32

from empo2_jax.config import MemoryConfig, RolloutConfig
from empo2_jax.envs.base import Environment, EnvironmentFamily
from empo2_jax.errors import EngineError, EnvError
from empo2_jax.memory.tips import buffer_key
from empo2_jax.progress import Seldom
from empo2_jax.prompts import tips_block
from empo2_jax.randomness import words
from empo2_jax.rollout.base import Completion, Engine, Request, Sampling
from empo2_jax.rollout.chat import Chat, TokenIds
from empo2_jax.rollout.reflect import TipWriter
from empo2_jax.types import Episode, Mode, Observation, Step, StopReason, Task, Tip


@dataclass(frozen=True)
class Assignment:
    """One episode to run; `id` is its seed path and names every draw in it."""

    id: str
    task: Task
    mode: Mode = Mode.ON_POLICY
    seed: int | None = None  # of its draws; None: the run's
    reflections: tuple[str, ...] = ()  # of earlier trials, at the end of the first turn; part of both prompts


@runtime_checkable
class TipSource(Protocol):
    """Where tips come from; `memory.tips.TipMemory` is one."""

    def retrieve_many(self, requests: Sequence[tuple[str, str]], others: Sequence[str] = ()) -> list[list[Tip]]:
        """Tips for (buffer, key text) pairs, best first; `others` are key texts that a commit will ask for."""
        ...


@runtime_checkable
class CountingTips(Protocol):
    """A source of tips that counts; `memory.tips.TipMemory` is one."""

    retrievals: tuple[int, int, int]  # queries, queries with a tip, tips


class Ended(NamedTuple):
    """A valid episode that is over and what its world said last; `told`: a tip was asked for."""

    episode: Episode
    observation: Observation
    told: bool


@runtime_checkable
class Keeper(Protocol):
    """Where ended episodes outlive this process; `journal.Journal` is one."""

    def find(self, assignment: Assignment) -> Ended | None:
        """What an earlier process made of an assignment."""
        ...

    def keep(self, ended: Sequence[Ended]) -> None:
        """Keep these, in the place of what was kept of the same assignments."""
        ...


@dataclass
class Live:
    """An episode in flight."""

    assignment: Assignment
    environment: Environment | None = None
    goal: str = ""
    observation: Observation | None = None
    prompt: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))  # with tips, up to the newest header
    bare: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))  # without tips
    key: str = ""
    tips: list[Tip] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stop: StopReason | None = None
    error: str = ""
    tip: str = ""
    tip_tokens: int = 0
    tip_prompt_tokens: int = 0
    told: bool = False  # a tip was asked for

    @classmethod
    def again(cls, assignment: Assignment, ended: Ended) -> "Live":
        """An episode that ended in an earlier process."""
        episode = ended.episode
        return cls(
            assignment,
            goal=episode.goal,
            observation=ended.observation,
            steps=list(episode.steps),
            stop=episode.stop_reason,
            tip=episode.tip,
            tip_tokens=episode.tip_tokens,
            tip_prompt_tokens=episode.tip_prompt_tokens,
            told=ended.told,
        )

    def fail(self, stop: StopReason, error: Exception) -> None:
        """End as invalid."""
        self.stop, self.error = stop, str(error)

    def episode(self, policy_version: int) -> Episode:
        """The finished record."""
        assert self.stop is not None
        observation = self.observation
        return Episode(
            id=self.assignment.id,
            task=self.assignment.task,
            goal=self.goal,
            mode=self.assignment.mode,
            steps=tuple(self.steps),
            stop_reason=self.stop,
            score=observation.score if observation else 0.0,
            success=observation.success if observation else False,
            policy_version=policy_version,
            tip=self.tip,
            tip_tokens=self.tip_tokens,
            tip_prompt_tokens=self.tip_prompt_tokens,
            error=self.error,
        )


class Collector:
    """Runs assignments to episodes with one engine and one environment family."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        family: EnvironmentFamily,
        rollout: RolloutConfig,
        *,
        step_limit: int,
        memory: MemoryConfig,
        seed: int,
        workers: int,
        banned_from: int,
    ):
        self._engine, self._chat, self._family, self._rollout = engine, chat, family, rollout
        self._step_limit, self._memory, self._seed, self._banned = step_limit, memory, seed, banned_from
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="environment")
        self.seconds = {"retrieval": 0.0, "tips": 0.0}  # wall time of finding tips and of writing them, so far

    @property
    def policy_version(self) -> int:
        """Of the weights that sample now."""
        return self._engine.policy_version

    def close(self) -> None:
        """End the threads; environments belong to the family."""
        self._threads.shutdown()

    def collect(
        self,
        assignments: Sequence[Assignment],
        *,
        temperature: float,
        memory: TipSource | None = None,
        writer: TipWriter | None = None,
        keeper: Keeper | None = None,
    ) -> list[Episode]:
        """One episode per assignment, in their order; failed ones are run again `rollout.retries` times.

        Args:
            assignments: What to run; ids must be unique.
            temperature: Of the actions' sampling.
            memory: Source of tips; needed if a mode acts with tips.
            writer: Writes a tip after each valid episode while its cache is warm.
            keeper: Is given every valid episode when it has ended and again with its tip; what it has is not run.
        """
        done: dict[str, Episode] = {}
        waiting, seldom = list(assignments), Seldom()

        for _ in range(self._rollout.retries + 1):
            for start in range(0, len(waiting), self._rollout.slots):
                wave, before = waiting[start : start + self._rollout.slots], len(assignments) - len(waiting) + start
                tell = partial(_tell, seldom, before, len(assignments))
                for episode in self._wave(wave, temperature, memory, writer, keeper, tell):
                    done[episode.id] = episode
            waiting = [item for item in assignments if not done[item.id].stop_reason.valid]
            if not waiting:
                break
        return [done[item.id] for item in assignments]

    def _wave(
        self,
        assignments: Sequence[Assignment],
        temperature: float,
        memory: TipSource | None,
        writer: TipWriter | None,
        keeper: Keeper | None,
        tell: Callable[[int, int], None],
    ) -> list[Episode]:
        lives, step = [_live(assignment, memory, keeper) for assignment in assignments], 0
        try:
            list(self._threads.map(self._start, [live for live in lives if live.stop is None]))
            while active := [live for live in lives if live.stop is None]:
                began = time.perf_counter()
                self._retrieve(active, memory)
                self.seconds["retrieval"] += time.perf_counter() - began
                for live in active:
                    self._render(live)
                self._act([live for live in active if live.stop is None], temperature)
                self._keep(active, keeper)
                step += 1
                tell(sum(live.stop is not None for live in lives), step)
            if writer is not None:
                began = time.perf_counter()
                asked = [live for live in lives if live.stop and live.stop.valid and live.steps and not live.told]
                writer.write(self._engine, asked)
                self.seconds["tips"] += time.perf_counter() - began
                for live in asked:
                    live.told = True
                self._keep(asked, keeper)
            return [live.episode(self._engine.policy_version) for live in lives]
        finally:
            for live in lives:
                self._engine.release(live.assignment.id)
                if live.environment is not None:
                    live.environment.close()

    def _keep(self, lives: Sequence[Live], keeper: Keeper | None) -> None:
        if keeper is not None:
            ended = [(live, live.observation) for live in lives if live.stop and live.stop.valid]
            version = self._engine.policy_version
            keeper.keep([Ended(live.episode(version), said, live.told) for live, said in ended if said])

    def _start(self, live: Live) -> None:
        task = live.assignment.task
        try:
            live.environment = self._family.make()
            live.observation = live.environment.reset(task, int(self._words(live, "environment")[0]))
            live.goal = live.environment.goal
        except EnvError as error:
            live.fail(StopReason.ENV_ERROR, error)

    def _words(self, live: Live, purpose: str, *counters: int) -> UInt32[np.ndarray, " 2"]:
        seed = self._seed if live.assignment.seed is None else live.assignment.seed
        return words(seed, purpose, live.assignment.id, *counters)

    def _retrieve(self, lives: Sequence[Live], memory: TipSource | None) -> None:
        for live in lives:
            live.key, live.tips = self._key(live), []
        asking = [live for live in lives if live.assignment.mode != Mode.ON_POLICY]
        if memory is None or not asking:
            return
        queries = [(buffer_key(live.assignment.task, self._memory.scope), live.key) for live in asking]
        others = [live.key for live in lives if live.assignment.mode == Mode.ON_POLICY]  # in the same batch of texts
        for live, tips in zip(asking, memory.retrieve_many(queries, others), strict=True):
            live.tips = tips

    def _key(self, live: Live) -> str:
        """Text whose embedding finds tips now: the state, or (released code) the transcript so far."""
        assert live.observation is not None
        if self._memory.key == "state":
            return self._family.memory_key(live.goal, live.observation.state)
        turns = [text for step in live.steps for text in (step.observation, step.action)]
        return "\n".join([live.goal, *turns, live.observation.text])

    def _render(self, live: Live) -> None:
        """Append the newest user turn to both prompts; an episode that cannot answer any more ends by length."""
        assert live.observation is not None
        block = tips_block([tip.content for tip in live.tips])
        text = live.observation.text
        if not live.steps:
            turn = self._family.first_turn(live.goal, text) + tips_block(live.assignment.reflections)
            live.bare, live.prompt = self._chat.opening(turn), self._chat.opening(turn + block)
        else:
            turn, answer = self._family.next_turn(text), live.steps[-1].action_ids
            past = live.prompt if self._memory.placement == "history" else live.bare
            live.prompt = np.concatenate([past, answer, self._chat.following(answer, turn + block)])
            live.bare = np.concatenate([live.bare, answer, self._chat.following(answer, turn)])
        if len(live.prompt) >= self._rollout.max_length:
            live.stop = StopReason.LENGTH

    def _act(self, lives: Sequence[Live], temperature: float) -> None:
        if not lives:
            return
        try:
            completions = self._sample(lives, temperature)
        except EngineError as error:
            for live in lives:
                live.fail(StopReason.ENGINE_ERROR, error)
            return
        list(self._threads.map(self._step, lives, completions))

    def _sample(self, lives: Sequence[Live], temperature: float) -> Sequence[Completion | EngineError]:
        """An answer for each."""
        return self._engine.generate([self._request(live, temperature) for live in lives])

    def _request(self, live: Live, temperature: float) -> Request:
        room = self._rollout.max_length - len(live.prompt)
        sampling = Sampling(
            max_tokens=min(self._rollout.max_action_tokens, room),
            temperature=temperature,
            stop_ids=self._chat.stop_ids,
            top_p=self._rollout.top_p,
            banned_from=self._banned,
        )
        key = self._words(live, "action", len(live.steps))
        return Request(live.assignment.id, live.prompt, key, sampling)

    def _step(self, live: Live, completion: Completion | EngineError) -> None:
        assert live.environment is not None and live.observation is not None
        if isinstance(completion, EngineError):
            live.fail(StopReason.ENGINE_ERROR, completion)
            return
        text = self._chat.text(completion.ids)
        before = live.observation
        try:
            live.observation = live.environment.step(text)
        except EnvError as error:
            live.fail(StopReason.ENV_ERROR, error)
            return
        after = live.observation
        live.steps.append(
            Step(
                observation=before.text,
                prompt_ids=live.prompt,
                bare_prompt_ids=live.bare,
                action_ids=completion.ids,
                behavior_logprobs=completion.logprobs,
                action=text,
                resolved=after.resolved,
                resolution=after.resolution,
                reward=after.reward,
                state=after.state,
                anchor=before.state,
                memory_key=live.key,
                tips=tuple(tip.content for tip in live.tips),
                tip_scores=tuple(tip.score for tip in live.tips),
                truncated=not completion.stopped,
                cached_tokens=completion.cached_tokens,
                policy_version=completion.policy_version,
                version_spans=completion.version_spans,
            )
        )
        if after.done:
            live.stop = StopReason.DONE
        elif len(live.steps) == self._step_limit:
            live.stop = StopReason.STEP_LIMIT


def _live(assignment: Assignment, memory: TipSource | None, keeper: Keeper | None) -> Live:
    """A new episode, or one that was kept; the lookups of that one are counted as if they had been made now."""
    ended = keeper.find(assignment) if keeper is not None else None
    if ended is None:
        return Live(assignment)
    if isinstance(memory, CountingTips) and assignment.mode != Mode.ON_POLICY:
        found = [len(step.tips) for step in ended.episode.steps]
        queries, hits, tips = memory.retrievals
        memory.retrievals = (queries + len(found), hits + sum(map(bool, found)), tips + sum(found))
    return Live.again(assignment, ended)


def _tell(seldom: Seldom, before: int, total: int, ended: int, step: int) -> None:
    seldom.note(f"acting: {before + ended} of {total} episodes have ended; step {step}")
