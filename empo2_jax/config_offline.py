"""Sections of what learns without reinforcement: the supervised warm start, Reflexion and Retrospex.

Their values in the paper's comparison are the defaults. Training by reinforcement is in `config.py`.
"""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from empo2_jax.config_base import Positive, Probability, Section

DEMONSTRATIONS, GOLD = "demonstrations", "gold"  # sources that are no run directory


class WarmstartConfig(Section):
    """Supervised next-token training on transcripts of training variations (`empo2 warmstart`)."""

    updates: int = Field(0, ge=0, description="optimizer steps; 0 = no warm start")
    source: tuple[str, ...] = Field(
        (DEMONSTRATIONS,),
        strict=False,
        min_length=1,
        description="what is imitated: `demonstrations` or `gold` paths of the environment, directories of runs",
    )
    demonstrations: Positive = Field(40, description="transcripts asked from the environment")
    kinds: tuple[str, ...] = Field(
        (), strict=False, description="kinds of these, in turn, for example of a newcomer; empty = all that there are"
    )
    variations: int = Field(
        0, ge=0, description="first training variations that they are made on; 0 = those of env.train_variations"
    )
    min_score: float = Field(-100.0, ge=-100, le=100, description="recorded episodes below this score are left out")
    max_steps: int = Field(0, ge=0, description="recorded episodes of more actions are left out; 0 = none")
    only_success: bool = Field(False, description="recorded episodes that did not succeed are left out")
    held_out: Probability = Field(
        0.0, lt=1, description="share of the problems whose transcripts only measure the loss"
    )
    held_out_every: Positive = Field(20, description="updates between two measurements of the held-out loss")
    patience: int = Field(
        0,
        ge=0,
        description="measurements in a row without a new best that end it, and the best weights are kept; "
        "0 = all updates, and the last ones are kept",
    )
    seed: int = Field(-1, ge=-1, description="seed of its draws; -1 = run.seed, so that every seed has its own start")
    shared_dir: str = Field(
        "", description="folder of starts that runs with equal settings share; empty = every run makes its own"
    )
    batch_episodes: Positive = Field(2, description="transcripts per optimizer step")
    checkpoint_every: int = Field(100, ge=0, description="updates between checkpoints of a warm start; 0 = none")
    learning_rate: float = Field(2e-4, gt=0, le=100, description="peak; linear warm-up, then cosine to a tenth")
    context_weight: float = Field(0.0, ge=0, description="loss weight of a prompt token; an answer token has 1")
    init: Literal["pretrained", "random"] = Field("pretrained", description="random: a new model of the shape below")
    hidden_size: Positive = Field(96, description="random init: d")
    num_layers: Positive = Field(3, description="random init: layers")
    num_heads: Positive = Field(4, description="random init: query heads")
    num_kv_heads: Positive = Field(2, description="random init: key/value heads")
    intermediate_size: Positive = Field(256, description="random init: feed-forward width")

    @field_validator("source", "kinds", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> "WarmstartConfig":
        if self.kinds and DEMONSTRATIONS not in self.source:
            raise ValueError(f"warmstart.kinds are of {DEMONSTRATIONS}, which warmstart.source does not name")
        if self.patience and not self.held_out:
            raise ValueError(f"warmstart.patience = {self.patience} needs warmstart.held_out above 0")
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError("warmstart: hidden_size must divide by num_heads, and num_heads by num_kv_heads")
        return self


class ReflexionConfig(Section):
    """Trials on the panel with the policy's own reflections (`algorithm.name = "reflexion"`)."""

    trials: Positive = Field(10, description="episodes per problem and repeat at most, one by one; a success ends them")
    kept: Positive = Field(3, description="newest reflections that the next trial sees")


class RetrospexConfig(Section):
    """An offline critic that rescores the policy's actions (`algorithm.name = "retrospex"`)."""

    runs: tuple[str, ...] = Field(
        (), strict=False, description="directories of runs whose recorded episodes the critic learns from too"
    )
    gold: int = Field(0, ge=0, description="gold paths of training problems that the critic learns from too")
    expectile: float = Field(0.7, gt=0, lt=1, description="τ of the value's regression towards Q")
    discount: Probability = Field(0.99, description="γ per action")
    learning_rate: float = Field(1e-4, gt=0, le=100, description="Adam's, of both critics and the value")
    target_rate: float = Field(
        0.005, gt=0, le=100, description="share of the new Q that its target takes over per update"
    )
    updates: Positive = Field(2000, description="optimizer steps of the critic")
    batch: Positive = Field(256, description="transitions per optimizer step")
    hidden_size: Positive = Field(256, description="units of the critic's two hidden layers")
    candidates: Positive = Field(5, description="actions that the policy proposes at every step")
    temperature: float = Field(1.0, gt=0, description="sampling temperature of the proposals")
    decay: Probability = Field(0.97, description="d: the policy's share is max(limit, d^step)")
    limit: Probability = Field(0.6, description="least share of the policy in an action's score")
