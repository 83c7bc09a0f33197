"""The nouns of the project: what flows from the environment to the optimizer.

Axis letters: `P` tasks of an iteration, `G` episodes of a group, `N` = P·G, `S` steps of an episode,
`R` rows, `B` packed rows of a batch, `T` tokens of a packed row, `N` those of them in branches, `A` action tokens of
a step, `K` tips, `D` embedding. A ragged list carries its axes as a suffix (`returns_P_G`).

Four log-probabilities (nats, at the training temperature, over the full vocabulary), never mixed up:
`behavior_logprobs` reported by the engine while sampling; `denominator_logprobs` recomputed by the trainer
before the first update; `logprobs` differentiated; `reference_logprobs` under the policy at the start of RL.

This module imports neither JAX nor the rest of the package.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int8, Int32


class Mode(IntEnum):
    """How one training episode acts and learns (paper section 4.2)."""

    ON_POLICY = 0  # acts without tips, learns without tips
    ON_POLICY_WITH_MEMORY = 1  # acts with tips, learns with tips
    OFF_POLICY = 2  # acts with tips, learns without tips

    @property
    def label(self) -> str:
        """The name in metrics: on, on_memory or off."""
        return ("on", "on_memory", "off")[self]


class StopReason(StrEnum):
    """Why an episode ended; the last two make it invalid, a fact and never a reward of 0."""

    DONE = "done"
    STEP_LIMIT = "step_limit"
    LENGTH = "length"
    ENV_ERROR = "env_error"
    ENGINE_ERROR = "engine_error"

    @property
    def valid(self) -> bool:
        """Whether the episode may enter means, advantages, tips, novelty and scores."""
        return self not in (StopReason.ENV_ERROR, StopReason.ENGINE_ERROR)


@dataclass(frozen=True)
class Task:
    """One problem instance: an environment, a task of it and a variation of that."""

    env: str
    name: str
    variation: int

    def __str__(self) -> str:
        return f"{self.env}/{self.name}/{self.variation}"


@dataclass(frozen=True)
class Message:
    """One chat turn as text; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Tip:
    """One memory entry: advice the policy wrote to itself, keyed by the state in which it applies."""

    counter: int  # order of arrival over the whole run
    buffer: str  # buffer key: environment, task and (by scope) variation
    content: str  # tip, action taken and final score, as shown in a prompt
    score: float  # return of the episode, rounded to 0.1 points
    embedding: Float32[np.ndarray, " D"]  # unit norm
    episode: str  # id of the episode that wrote it
    step: int
    policy_version: int
    iteration: int


@dataclass(frozen=True)
class Step:
    """One action with the prompts under which it is acted and learned."""

    observation: str  # text shown before the action
    prompt_ids: Int32[np.ndarray, " prompt"]  # what the policy saw, tips included
    bare_prompt_ids: Int32[np.ndarray, " bare_prompt"]  # the same without tips
    action_ids: Int32[np.ndarray, " A"]  # sampled ids, the stop token included when it was sampled
    behavior_logprobs: Float32[np.ndarray, " A"]  # nats
    action: str  # decoded text of the action
    resolved: str  # what was sent to the environment
    resolution: str  # how: exact, engine, choice, similar, invalid (see envs/actions.py)
    reward: float  # score points
    state: str  # text of the state reached (observation and inventory), for novelty
    anchor: str = ""  # text of the state before the action: steps of a group with the same one are comparable
    memory_key: str = ""  # text whose embedding finds tips before the action and keys the entry written after it
    tips: tuple[str, ...] = ()  # contents of the tips in the newest block
    tip_scores: tuple[float, ...] = ()
    intrinsic_reward: float = 0.0
    truncated: bool = False  # the action ran into the token limit
    cached_tokens: int = 0  # prompt tokens the engine did not recompute
    policy_version: int = 0  # of the weights that sampled the last id
    version_spans: tuple[tuple[int, int, int], ...] = ()  # (version, first id, end), from engines that may mix them

    @property
    def valid(self) -> bool:
        """Whether the text was an action that the environment accepted."""
        return self.resolution != "invalid"

    @property
    def acted_with_tips(self) -> bool:
        """Whether any tip stood in the prompt, of this turn or an earlier one."""
        return not np.array_equal(self.prompt_ids, self.bare_prompt_ids)


@dataclass(frozen=True)
class Episode:
    """One trajectory with everything needed to learn from it and to show it to a person."""

    id: str  # "i<iteration>/g<group>/e<member>", or the panel's path in evaluation
    task: Task
    goal: str
    mode: Mode
    steps: tuple[Step, ...]
    stop_reason: StopReason
    score: float  # final score of the environment, points
    success: bool
    policy_version: int
    tip: str = ""  # the tip written after the episode ("" if none)
    tip_tokens: int = 0  # sampled for it
    tip_prompt_tokens: int = 0  # of the request for it that the engine had to compute
    error: str = ""  # what failed, for the two invalid stop reasons

    @property
    def with_memory(self) -> bool:
        """Whether it acted with tips."""
        return self.mode != Mode.ON_POLICY

    @property
    def extrinsic_return(self) -> float:
        """Undiscounted sum of the environment's rewards, points."""
        return float(sum(step.reward for step in self.steps))

    @property
    def intrinsic_return(self) -> float:
        """Undiscounted sum of the novelty rewards."""
        return float(sum(step.intrinsic_reward for step in self.steps))


@dataclass(frozen=True)
class EpisodeGroup:
    """All episodes of one task in one iteration, invalid ones present and flagged by their stop reason."""

    task: Task
    episodes: tuple[Episode, ...]


class Branch(NamedTuple):
    """A side branch of a row: it continues the first `cut` tokens of the trunk and sees nothing else of the row."""

    cut: int  # tokens of the trunk
    length: int  # tokens of its own; the first is never an action token


@dataclass(frozen=True)
class Row:
    """One token sequence, the trunk, and side branches that continue a prefix of it, one after another behind it.

    `T` tokens in all; loss arrays are 0 off the mask. `logprobs[t]` of every ledger belongs to the token at `t`,
    predicted from the tokens before it in the trunk, or in the branch and the part of the trunk that it continues.
    """

    token_ids: Int32[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]  # True on the action tokens of the loss, once for each
    step_index: Int32[np.ndarray, " T"]  # step of the action token, of its copy in a branch too; -1 elsewhere
    behavior_logprobs: Float32[np.ndarray, " T"]  # nats, under the prompt that acted
    advantages: Float32[np.ndarray, " T"]
    token_weight: Float32[np.ndarray, " T"]  # see data/rows.py: the loss is one weighted sum
    mode: Mode
    episode: int  # index into the iteration's valid episodes
    denominator_logprobs: Float32[np.ndarray, " T"] | None = None
    reference_logprobs: Float32[np.ndarray, " T"] | None = None
    rollout_weight: Float32[np.ndarray, " T"] | None = None
    mask_threshold: float = 0.0  # probability; 0 = no mask
    branches: tuple[Branch, ...] = ()

    @property
    def trunk(self) -> int:
        """Tokens of the trunk."""
        return len(self.token_ids) - sum(branch.length for branch in self.branches)


class Branches(NamedTuple):
    """What tokens of branches see: their own branch up to themselves, and of the trunk a prefix."""

    ids: Int32[np.ndarray, "B N"]  # of the branch, unique in a packed row and in one piece; 0 = padding
    limits: Int32[np.ndarray, "B N"]  # column of the packed row at which the visible part of the trunk ends


class TrainBatch(NamedTuple):
    """Packed rows of fixed shape [B, T]; padding has segment 0 and loss mask False. A pytree without JAX.

    Trunks come first; the last N columns hold the branches, if there are any.
    """

    token_ids: Int32[np.ndarray, "B T"]
    segment_ids: Int32[np.ndarray, "B T"]  # 1, 2, … per row packed in a sequence, branches too; 0 = padding
    positions: Int32[np.ndarray, "B T"]  # restart at 0 in every segment, at the cut in every branch
    loss_mask: Bool[np.ndarray, "B T"]
    advantages: Float32[np.ndarray, "B T"]
    denominator_logprobs: Float32[np.ndarray, "B T"]
    rollout_weight: Float32[np.ndarray, "B T"]
    token_weight: Float32[np.ndarray, "B T"]
    mask_threshold: Float32[np.ndarray, "B T"]  # probability, 0 = off
    reference_logprobs: Float32[np.ndarray, "B T"]
    mode: Int8[np.ndarray, "B T"]  # for metrics only: the learner has no branch on it
    branches: Branches | None = None


class Transitions(NamedTuple):
    """Steps of recorded episodes for an offline critic; states and actions as embeddings."""

    states: Float32[np.ndarray, "N D"]
    actions: Float32[np.ndarray, "N D"]
    rewards: Float32[np.ndarray, " N"]  # shares of the full score
    next_states: Float32[np.ndarray, "N D"]  # any value where the episode ended
    ended: Bool[np.ndarray, " N"]


@dataclass(frozen=True)
class Proposals:
    """What a policy would answer in one state, each text once."""

    goal: str
    state: str
    step: int  # actions before
    answers: tuple[str, ...]  # [K]
    likelihoods: Float64[np.ndarray, " K"]  # geometric mean of an answer's token probabilities, 0–1


@dataclass(frozen=True)
class Observation:
    """What an environment says after reset or step."""

    text: str  # shown to the policy
    reward: float  # score points gained by the last action (0 after reset)
    score: float  # total score, points
    done: bool
    success: bool
    state: str  # text identifying the state reached, for novelty and memory keys (no step counter)
    resolved: str = ""
    resolution: str = "exact"
