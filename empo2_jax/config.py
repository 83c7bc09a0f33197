"""The configuration: TOML in, validated pydantic models out. Every key, its meaning, unit and default stand here.

Presets stack with `extends = "other.toml"`, or a list of which the later overrides the earlier (relative to the file; a
child overrides its parent key by key). An unknown key is an error that names the nearest known one. Code below
`trainer.run` receives a section, never the whole.
"""

import difflib
import math
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from empo2_jax.config_base import NonNegative, Positive, Probability, Section
from empo2_jax.config_env import EnvConfig
from empo2_jax.config_offline import ReflexionConfig, RetrospexConfig, WarmstartConfig
from empo2_jax.errors import ConfigError, wrong_value

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)


class RunConfig(Section):
    """The run as a whole."""

    name: str = Field("run", description="name of the run; the run directory defaults to runs/<name>")
    dir: str = Field("", pattern=r"^[^\\]*$", description="run directory, no backslash in it; empty = runs/<name>")
    seed: int = Field(0, ge=0, description="seed of every draw of the run")
    iterations: int = Field(100, ge=0, description="iterations (rollout + update) of the whole run")
    tensorboard: bool = Field(True, description="write TensorBoard event files beside metrics.jsonl")
    trackers: tuple[Literal["wandb", "mlflow"], ...] = Field(
        (), strict=False, description="also told of the metrics; where and how, their own environment variables say"
    )
    mirror: str = Field("", description="URL (s3://…, gs://…, file://…) where checkpoints and all else are copied to")
    watchdog_s: float = Field(
        1800.0,
        ge=0,
        description="seconds a process may show no progress, or wait for another, before it ends; 0 = no limit",
    )
    updates_kept: int = Field(
        0, ge=0, description="newest iterations whose batches `empo2 debug` can run again; a skipped update always is"
    )
    episodes_logged: int = Field(64, ge=0, description="episodes written in full to episodes/<iteration>.jsonl")


class ModelConfig(Section):
    """The policy."""

    path: str = Field(
        "smollm2-135m-instruct",
        min_length=1,
        description="Hugging Face folder, hub id, `smollm2-135m-instruct` (installable) or `toy` (shipped start)",
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field("float32", description="activations")
    master_dtype: Literal["float32"] = Field("float32", description="weights that are trained; bfloat16 loses updates")
    attention: Literal["auto", "xla", "cudnn", "splash"] = Field(
        "auto", description="kernel of the training pass; auto: cudnn (NVIDIA, bfloat16), splash (TPU), else xla"
    )
    remat: Literal["none", "dots", "full"] = Field(
        "full", description="kept of a layer for the backward pass: all, outputs of linear layers, only its input"
    )
    mesh: tuple[Positive, Positive, Positive] = Field(
        (1, 1, 1), strict=False, description="devices along the axes data, fsdp, tensor"
    )

    @field_validator("master_dtype", mode="before")
    @classmethod
    def _no_lost_updates(cls, value: Any) -> Any:
        if value == "bfloat16":
            raise ValueError(
                "steps of a learning rate like 1e-6 are below the resolution of bfloat16, so that 99 % of the weights "
                "would never move; float32 is allowed (model.compute_dtype may be bfloat16)"
            )
        return value


class RolloutConfig(Section):
    """Collecting episodes."""

    tasks_per_iteration: Positive = Field(16, description="P: tasks drawn per iteration")
    group_size: Positive = Field(8, description="G: episodes per task")
    temperature: float = Field(1.0, gt=0, description="sampling temperature of training episodes; also the learner's")
    top_p: float = Field(1.0, gt=0, le=100, description="nucleus of the sampling; training needs 1")
    max_action_tokens: Positive = Field(32, description="tokens per action")
    max_length: Positive = Field(4500, description="tokens of one episode, prompts and answers; ends with `length`")
    slots: Positive = Field(16, description="episodes at a time; with the in-process engine each holds a KV cache")
    max_staleness: int = Field(
        0, ge=0, description="versions that a rollout's weights may lag behind its update; 0 = collect, then update"
    )
    retries: int = Field(1, ge=0, description="times an episode that failed is run again with the same draws")
    engine: Literal["jax", "sglang"] = Field("jax", description="who samples: this process, or `servers`")
    servers: tuple[str, ...] = Field((), strict=False, description="URLs of servers, or a file with one a line")
    router: str = Field("", description="URL that completions go through; weights still go to every one of `servers`")
    api_key_env: str = Field("EMPO2_API_KEY", description="environment variable with the servers' API key, if any")
    admin_key_env: str = Field("EMPO2_ADMIN_KEY", description="… with their admin key; unset = the API key")
    weights_dir: str = Field("", description="folder that servers load versions from; empty = <run>/weights")
    weights_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the published weights, which should be the servers'; auto = model.compute_dtype"
    )
    mixed_versions: bool = Field(False, description="whether an episode may be sampled by several weight versions")
    canary_tolerance: NonNegative = Field(
        0.0, description="nats between server and trainer on a fixed prompt; 0 = 1e-4, or 5e-2 where bf16 is involved"
    )
    release_memory: bool = Field(
        False, description="the engine gives weights and caches back during updates, which run on the same chips"
    )
    in_flight: Positive = Field(64, description="requests at a time and server")
    attempts: Positive = Field(5, description="of one request, on other servers where there are any")
    request_timeout_s: float = Field(300.0, gt=0, description="seconds for one completion")
    control_timeout_s: float = Field(600.0, gt=0, description="seconds for one load of weights")
    recovery_timeout_s: float = Field(300.0, gt=0, description="seconds without any server until requests fail")

    @field_validator("servers", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class AlgorithmConfig(Section):
    """What is learned from the episodes (paper sections 4.1 and 4.2)."""

    name: Literal["empo2", "grpo", "gigpo", "reflexion", "retrospex"] = Field(
        "empo2",
        description="grpo: empo2 with p_memory 0 and no novelty; gigpo: grpo with step advantages; "
        "reflexion, retrospex: no update of the policy, see their sections",
    )
    p_memory: Probability = Field(0.25, description="p: probability that an episode acts with tips")
    q_off_policy: Probability = Field(2 / 3, description="q: given tips, probability of learning without them")
    mode_scope: Literal["iteration", "group", "episode"] = Field("episode", description="what one draw of p, q covers")
    off_policy_denominator: Literal["student", "behavior"] = Field(
        "student", description="old policy of off-policy rows: without tips (student) or with tips (behavior)"
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="ε_low: ratio is clipped at 1 − ε_low")
    clip_high: float = Field(0.3, gt=0, description="ε_high: ratio is clipped at 1 + ε_high")
    dual_clip: float = Field(10.0, gt=1, description="c: bound of the loss where the advantage is negative")
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "episode-mean"] = Field(
        "seq-mean-token-mean", description="how tokens are averaged; a sequence is one step (an action)"
    )
    min_token_prob: Probability = Field(0.0067, description="δ: less likely tokens give no policy loss; 0 = off")
    mask_modes: Literal["off_policy", "all"] = Field("off_policy", description="rows that the δ-mask applies to")
    mask_sign: Literal["all", "negative"] = Field(
        "negative", description="δ-mask on all tokens or where the advantage is negative"
    )
    mask_unit: Literal["token", "row"] = Field("token", description="row: an unlikely token drops its whole step")
    kl_coefficient: NonNegative = Field(0.0, description="β of the k3 estimate against the policy at the start of RL")
    entropy_coefficient: NonNegative = Field(0.0, description="c_H: bonus per nat of entropy")
    advantage_baseline: Literal["group", "mode"] = Field("group", description="members a return is compared with")
    advantage_std_floor: NonNegative = Field(5.0, description="least standard deviation to divide by, points")
    advantage_normalization: Literal["std", "none"] = Field(
        "std", description="none: less the mean only, in points (both terms of gigpo)"
    )
    step_weight: NonNegative = Field(1.0, description="gigpo: w, weight of the step advantage")
    step_discount: Probability = Field(0.95, description="gigpo: γ per step of the return that steps are compared by")
    rollout_correction: Literal["auto", "on", "off"] = Field(
        "auto",
        description="truncated importance weight engine→trainer; auto = off with an in-process engine that never lags",
    )
    rollout_correction_cap: float = Field(2.0, gt=0, description="cap of that weight")

    @property
    def learns(self) -> bool:
        """Whether episodes update the policy."""
        return self.name not in ("reflexion", "retrospex")


class MemoryConfig(Section):
    """Tips: written after episodes, retrieved while acting (paper section 4.1)."""

    capacity: Positive = Field(1000, description="entries per buffer")
    threshold: float = Field(0.5, ge=-1, le=1, description="a tip is retrieved if its cosine is strictly above this")
    top_k: Positive = Field(10, description="tips per block, best score first")
    scope: Literal["variation", "task", "global"] = Field("variation", description="what shares one buffer")
    key: Literal["state", "transcript"] = Field("state", description="text that is embedded as key of an entry")
    distinct_episodes: bool = Field(True, description="at most one tip per source episode in a block")
    placement: Literal["history", "latest"] = Field(
        "history", description="a tip block stays in the turn where it was retrieved, or only the newest turn has one"
    )
    eviction: Literal["fifo", "lowest_score"] = Field("fifo", description="entry that leaves a full buffer")
    duplicates: Literal["renew", "drop"] = Field("renew", description="a content written again: newest, or as it was")
    tip_max_tokens: Positive = Field(128, description="tokens of one tip")
    writer: Literal["policy", "scripted"] = Field("policy", description="who writes tips; scripted is for tests")
    embedder: Literal["minilm", "hashing"] = Field("minilm", description="text to vector; hashing for the toy")
    index: Literal["exact", "scann"] = Field("scann", description="nearest-neighbor search; both give the same answers")


class IntrinsicConfig(Section):
    """Reward for novel states (paper section 4.3)."""

    kind: Literal["count", "rnd", "none"] = Field(
        "count",
        description="count: coefficient / visits of similar states; rnd: error of a predictor of random features",
    )
    coefficient: NonNegative = Field(1.0, description="points of a first visit")
    threshold: float = Field(0.95, ge=-1, le=1, description="count: cosine from which two states are the same")
    revisits: bool = Field(True, description="count: pay coefficient/n for revisits too")
    rnd_learning_rate: float = Field(1e-3, gt=0, description="rnd: Adam's, of the predictor")


class UpdateConfig(Section):
    """The optimizer and its batches."""

    learning_rate: float = Field(1e-6, gt=0, le=100, description="constant after the warm-up")
    warmup_updates: int = Field(0, ge=0, description="updates with a linearly growing rate")
    weight_decay: NonNegative = Field(0.01, description="AdamW's decoupled weight decay")
    beta1: Probability = Field(0.9, description="AdamW β1")
    beta2: Probability = Field(0.999, description="AdamW β2")
    max_grad_norm: float = Field(1.0, gt=0, description="global gradient norm is clipped to this")
    minibatch_steps: Positive = Field(128, description="step rows (actions) per optimizer step; episodes stay whole")
    epochs: Positive = Field(1, description="passes over the episodes of an iteration")
    buckets: tuple[Positive, ...] = Field((512, 1024, 2048, 4608), strict=False, description="row lengths T, at most 4")
    micro_batch_tokens: Positive = Field(4608, description="tokens per forward pass of all devices, with padding")
    offload_moments: bool = Field(False, description="keep the optimizer's moments in host memory between updates")

    @model_validator(mode="after")
    def _check(self) -> "UpdateConfig":
        if list(self.buckets) != sorted(set(self.buckets)) or not 1 <= len(self.buckets) <= 4:
            raise ValueError(f"update.buckets = {list(self.buckets)}: 1 to 4 increasing lengths are allowed")
        if self.micro_batch_tokens < self.buckets[-1]:
            raise ValueError(
                f"update.micro_batch_tokens = {self.micro_batch_tokens} is below the largest bucket {self.buckets[-1]}"
            )
        return self


class LoraConfig(Section):
    """Low-rank adapters: updates train them alone and the start's weights stay. A warm start trains all weights."""

    enabled: bool = Field(False, description="train adapters instead of all weights")
    rank: int = Field(16, ge=1, le=1024, description="r: columns of an adapter's two matrices")
    alpha: float = Field(32.0, gt=0, description="an adapter's output is scaled by alpha / rank")
    targets: tuple[Target, ...] = Field(
        TARGETS, strict=False, min_length=1, description="linear layers with an adapter"
    )

    @field_validator("targets")
    @classmethod
    def _distinct(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(targets)) < len(targets):
            raise ValueError("a layer occurs twice; each once is allowed")
        return targets

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.alpha / self.rank


class EvaluationConfig(Section):
    """The fixed panel: no memory, fixed seeds."""

    every: int = Field(10, ge=0, description="iterations between evaluations; 0 = only before the first and at the end")
    panel: str = Field("", description="TOML file that fixes problems and all keys below; see configs/panels")
    split: Literal["train", "dev", "test"] = Field("test", description="split of the panel's variations")
    variations: Positive = Field(20, description="first variations per task")
    repeats: Positive = Field(4, description="episodes per variation")
    temperature: NonNegative = Field(0.4, description="sampling temperature")
    seed: int = Field(0, ge=0, description="seed of the panel's draws, the same in every run: weights differ, not luck")


class CheckpointConfig(Section):
    """Saving and keeping."""

    every: Positive = Field(1, description="iterations between checkpoints; the last one is always saved")
    keep: Positive = Field(3, description="newest checkpoints kept")
    keep_every: int = Field(0, ge=0, description="also kept: those of every so many iterations; 0 = none")
    keep_best: int = Field(0, ge=0, description="also kept: so many with the best score on the panel, to look at")

    @property
    def kept(self) -> tuple[int, int, int]:
        """All three."""
        return self.keep, self.keep_every, self.keep_best


class Config(Section):
    """One experiment."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    memory: MemoryConfig = MemoryConfig()
    intrinsic: IntrinsicConfig = IntrinsicConfig()
    update: UpdateConfig = UpdateConfig()
    lora: LoraConfig = LoraConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    warmstart: WarmstartConfig = WarmstartConfig()
    reflexion: ReflexionConfig = ReflexionConfig()
    retrospex: RetrospexConfig = RetrospexConfig()

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.rollout.top_p < 1:
            raise ValueError("rollout.top_p < 1: training needs top_p = 1 (log-probs are over the full vocabulary)")
        row, tokens = self.update.buckets[-1], self.update.micro_batch_tokens
        if self.rollout.max_length > row:
            raise ValueError(f"rollout.max_length = {self.rollout.max_length} exceeds the largest bucket {row}")
        shards = self.model.mesh[0] * self.model.mesh[1]
        if tokens < shards * row:
            raise ValueError(
                f"update.micro_batch_tokens = {tokens} has no row of the largest bucket for each of data × fsdp = "
                f"{shards} shards; at least {shards * row} is allowed"
            )
        branches = self.memory.placement == "latest" and self.algorithm.p_memory > 0
        if branches and tokens < 2 * shards * row:
            raise ValueError(
                f'memory.placement = "latest": update.micro_batch_tokens = {tokens} has no room for branches beside a '
                f"row of the largest bucket; at least {2 * shards * row} is allowed"
            )
        for key, folder in (("run.dir", self.run.dir), ("rollout.weights_dir", self.rollout.weights_dir)):
            if "://" in folder:
                raise ValueError(
                    f"{key} = {folder!r}: a folder on this machine is allowed; run.mirror copies it to a URL"
                )
        if self.run.mirror and "://" not in self.run.mirror:
            raise ValueError(
                f"run.mirror = {self.run.mirror!r}: a URL with its scheme is allowed: s3://…, gs://…, file://…"
            )
        urls = (*self.rollout.servers, self.rollout.router, self.run.mirror)
        if any(map(names_user, urls)):
            raise ValueError(
                "no user and key in a URL, since the run directory shows it; environment variables have them"
            )
        if self.rollout.engine == "sglang" and not self.rollout.servers:
            raise ValueError('rollout.engine = "sglang" needs rollout.servers: URLs, or a file with one a line')
        if self.rollout.max_staleness and self.rollout.engine == "jax" and self.model.mesh != (1, 1, 1):
            raise ValueError(
                f"rollout.max_staleness = {self.rollout.max_staleness}: an engine in this process cannot sample while "
                f'{math.prod(self.model.mesh)} devices update; 0, or rollout.engine = "sglang", is allowed'
            )
        if self.rollout.max_staleness and self.rollout.release_memory:
            raise ValueError(
                "rollout.max_staleness > 0 with rollout.release_memory: servers sample during updates; one is allowed"
            )
        name = self.algorithm.name
        if self.run.mirror and not self.algorithm.learns:
            raise ValueError(
                f'run.mirror with algorithm.name = "{name}", which has no checkpoints to send; "" is allowed'
            )
        if name != "empo2" and (self.algorithm.p_memory > 0 or self.intrinsic.kind != "none"):
            raise ValueError(f'algorithm.name = "{name}" needs algorithm.p_memory = 0 and intrinsic.kind = "none"')
        return self

    @property
    def served_dtype(self) -> str:
        """Of the weights that servers load."""
        return self.model.compute_dtype if self.rollout.weights_dtype == "auto" else self.rollout.weights_dtype

    @property
    def canary_tolerance(self) -> float:
        """Nats that a server may differ from the trainer on the canary."""
        exact = self.served_dtype == self.model.compute_dtype == "float32"
        return self.rollout.canary_tolerance or (1e-4 if exact else 5e-2)

    @property
    def run_dir(self) -> Path:
        """Where the run lives."""
        return Path(self.run.dir or f"runs/{self.run.name}")


def names_user(url: str) -> bool:
    """Whether a URL names a user, and so perhaps a password or key."""
    return "@" in url.partition("://")[2].partition("/")[0]


def _known(location: tuple[Any, ...]) -> list[str]:
    model: Any = Config
    for part in location:
        field = model.model_fields.get(part)
        model = field.annotation if field else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
    return list(model.model_fields)


def _explain(source: str, error: ValidationError) -> str:
    first = error.errors()[0]
    location = first["loc"]
    key = ".".join(str(part) for part in location)
    if first["type"] == "extra_forbidden":
        known = _known(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.0)
        return (
            f"{source}: unknown key `{key}`; the nearest known key is `{'.'.join([*map(str, location[:-1]), *near])}`"
        )
    return f"{source}: {wrong_value(first)}"


def parse_config(values: dict[str, Any], source: str = "configuration") -> Config:
    """Validate nested values; `source` names them in errors."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(source, error)) from None
