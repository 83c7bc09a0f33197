"""The supervised warm start: next-token training on transcripts of training variations (`empo2 warmstart`).

A small model utters almost no valid action, so all returns of a group are equal and reinforcement learning cannot
begin. A few minutes on the environment's demonstrations give it a real, mixed signal. Loss falls on the answers, and
for a random policy, which has to learn to copy at all, a little on the prompts; the learner and its batches are those
of the RL update. This is a start, not the paper's method.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from empo2_jax import assembly, distributed
from empo2_jax.alarms import count_skipped
from empo2_jax.assembly import Policy
from empo2_jax.checkpoint import CheckpointStore
from empo2_jax.config import Config, UpdateConfig, WarmstartConfig
from empo2_jax.data.packing import pack
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.evaluation import evaluate
from empo2_jax.learner.optim import warmstart_optimizer
from empo2_jax.learner.step import Learner, LearnerState, supervised_loss
from empo2_jax.metrics import write_atomically
from empo2_jax.models.hf_folder import new_folder
from empo2_jax.models.hf_weights import save_model
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.word_tokenizer import write_word_tokenizer
from empo2_jax.progress import RunProgress, note
from empo2_jax.randomness import generator
from empo2_jax.rollout.chat import Chat
from empo2_jax.types import Message, Mode, Row


def answer_row(chat: Chat, messages: Sequence[Message], context_weight: float = 0.0) -> Row:
    """One transcript as a row: weight 1 for every assistant turn with its closing token, less or none for the rest."""
    pieces = [(chat.opening(messages[0].content), False)]
    for message in messages[1:]:
        last = pieces[-1][0]
        is_answer = message.role == "assistant"
        pieces.append((chat.answer(message.content) if is_answer else chat.following(last, message.content), is_answer))
    token_ids = np.concatenate([ids for ids, _ in pieces])
    answers = np.concatenate([np.full(len(ids), is_answer) for ids, is_answer in pieces])
    weight = np.where(answers, 1.0, context_weight).astype(np.float32)
    weight[0] = 0.0  # nothing predicts the first token
    mask = weight > 0
    zeros = np.zeros(len(token_ids), np.float32)
    return Row(
        token_ids=token_ids,
        loss_mask=mask,
        step_index=np.where(mask, 0, -1).astype(np.int32),
        behavior_logprobs=zeros,
        advantages=zeros,
        token_weight=weight,
        mode=Mode.ON_POLICY,
        episode=0,
    )


def ensure_start(config: Config, family: EnvironmentFamily, folder: Path) -> Path:
    """`folder`, made by `make_start` if it is not there.

    Raises:
        ConfigError: no warm start is configured, or the folder comes from other settings.
    """
    if not config.warmstart.updates:
        raise ConfigError("warmstart.updates = 0: this configuration has no warm start")
    gang = distributed.current()
    if not gang.first(folder.is_dir, "warm start"):
        make_start(config, family, folder)
    origin = folder / "made_from.txt"
    if not origin.is_file() or origin.read_text(encoding="utf-8") != _origin(config):
        raise ConfigError(f"{folder}: made by another configuration; remove it or choose another folder")
    return folder


def _origin(config: Config) -> str:
    """Hash of all settings that a start depends on."""
    parts = {
        "seed": config.run.seed,
        "model": config.model.path,
        "env": config.env.model_dump(exclude={"workers", "step_timeout_s"}),
        "warmstart": config.warmstart.model_dump(exclude={"checkpoint_every"}),
        "update": config.update.model_dump(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def make_start(config: Config, family: EnvironmentFamily, folder: Path) -> None:
    """Warm-start the policy of `model.path`, or a random one, into a new Hugging Face folder, in one rename.

    `before.json` in the folder is the panel of the untrained policy, absent for a random one.
    """
    with tempfile.TemporaryDirectory(prefix="empo2-random-") as place:
        base = None
        if config.warmstart.init == "random":
            base = Path(place) / "policy"
            words = family.vocabulary()
            if not words:
                raise ConfigError(f'warmstart.init = "random" needs a world of few words; {family.name} is open')
            random_policy(config.warmstart, words, config.run.seed, base)
        policy = assembly.load_policy(config.model, base)
        before = None if base else _evaluate_untrained(config, policy, family)
        note(f"warm start: {config.warmstart.updates} updates on demonstrations of training variations")
        partial = folder.with_name(f"{folder.name}.{_origin(config)[:12]}.partial")  # an interrupted one goes on there
        with RunProgress(config.warmstart.updates, unit="update") as progress:
            params, losses = train(
                policy,
                family,
                config.warmstart,
                config.update,
                seed=config.run.seed,
                remat=config.model.remat,
                store=CheckpointStore(partial, keep=1),
                report=lambda done, loss: progress.update(done, {"warmstart/loss": loss}),
            )
        params = distributed.own_copy(params)

        def write() -> None:
            with new_folder(folder) as work:
                save_model(work, params, policy.model.config, tokenizer_folder=policy.folder)
                write_atomically(work / "losses.json", json.dumps(losses))
                write_atomically(work / "made_from.txt", _origin(config))
                if before is not None:
                    write_atomically(work / "before.json", json.dumps(before))
            shutil.rmtree(partial, ignore_errors=True)

        distributed.current().first(write, "warm start")


def _evaluate_untrained(config: Config, policy: Policy, family: EnvironmentFamily) -> dict[str, Any]:
    note(f"evaluating on {config.evaluation.split}, without memory (before the warm start)")
    engine = assembly.make_engine(config, policy)
    with closing(engine):
        engine.load(policy.params, 0)
        with closing(assembly.make_collector(config, policy, engine, family)) as collector:
            panel = evaluate(collector, family, config.evaluation)
    return panel.record("before warm start", 0, config.evaluation.split)


def random_policy(config: WarmstartConfig, words: Sequence[str], seed: int, folder: Path) -> None:
    """Write an untrained model of the configured shape with a word-level tokenizer into a new folder."""
    tokenizer_folder = folder.with_name("tokenizer")
    size = write_word_tokenizer(tokenizer_folder, words)
    shape = Qwen2Config(
        vocab_size=size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.hidden_size // config.num_heads,
        intermediate_size=config.intermediate_size,
        tie_embeddings=True,
        # The usual 0.02 leaves a narrow model's attention uniform: copying was not learned in 1,400 updates.
        initializer_range=config.hidden_size**-0.5,
        max_position_embeddings=4096,
    )
    params = nnx.split(Qwen2(shape, rngs=nnx.Rngs(seed)))[1]
    save_model(folder, params, shape, tokenizer_folder=tokenizer_folder)


def train(
    policy: Policy,
    family: EnvironmentFamily,
    config: WarmstartConfig,
    update: UpdateConfig,
    *,
    seed: int,
    remat: str,
    store: CheckpointStore,
    report: Callable[[int, float], None],
) -> tuple[Any, list[float]]:
    """Trained parameters and the loss (nats per weighted token) of every update that was not skipped.

    It goes on from the newest checkpoint of `store` and leaves one there every `checkpoint_every` updates.

    Raises:
        UpdateError: see `count_skipped`.
        ConfigError: the environment has no demonstrations.
        DataError: no transcript fits the largest bucket.
    """
    chats = family.demonstrations("train", config.demonstrations, seed)
    if not chats:
        raise ConfigError(f"warmstart.updates > 0: environment {family.name} offers no demonstrations")
    chat = Chat(policy.tokenizer, family.system_prompt())
    rows = [answer_row(chat, item, config.context_weight) for item in chats]
    rows = [row for row in rows if len(row.token_ids) <= update.buckets[-1]]
    if not rows:
        raise DataError(f"no demonstration of {family.name} fits the largest of update.buckets = {update.buckets[-1]}")
    graphdef, params = nnx.split(policy.model)
    learner = Learner(
        graphdef,
        warmstart_optimizer(config),
        supervised_loss,
        temperature=1.0,
        remat=remat,
        mesh=policy.mesh,
        offload_moments=update.offload_moments,
    )
    state = learner.init(jax.tree.map(lambda leaf: leaf.copy(), params))
    order: list[int] = []
    losses: list[float] = []
    done, skipped = 0, 0
    newest = store.latest()
    if newest is not None:
        restored, _, cursor = store.restore(newest, state)
        state, (done, skipped, losses) = LearnerState(*restored), cursor["progress"]
    for number in range(config.updates):
        while len(order) < config.batch_episodes:
            order += generator(seed, "warmstart-order", number, len(order)).permutation(len(rows)).tolist()
        batch, order = [rows[index] for index in order[: config.batch_episodes]], order[config.batch_episodes :]
        if number < done:
            continue  # this batch was learned before the interruption
        tokens = float(sum(row.token_weight.sum() for row in batch))
        scaled = [_scaled(row, 1.0 / tokens) for row in batch]
        packed = pack(scaled, update.buckets, update.micro_batch_tokens, learner.row_multiple)
        state, sums = learner.update(state, packed.batches)
        skipped = count_skipped(skipped, bool(sums["skipped"]), f"warm start, update {number + 1}")
        loss = float(sums["loss"])
        losses += [] if skipped else [loss]
        report(number + 1, loss)
        if config.checkpoint_every and (number + 1) % config.checkpoint_every == 0 and number + 1 < config.updates:
            cursor = {"progress": (number + 1, skipped, losses), "metrics_lines": 0}
            store.save(number + 1, state=state, memory_dump=_nothing, novelty_dump=_nothing, cursor=cursor)
    return state.params, losses


def _nothing(folder: Path) -> None:
    """What a warm start remembers beside its weights."""


def _scaled(row: Row, factor: float) -> Row:
    return replace(row, token_weight=row.token_weight * np.float32(factor))
