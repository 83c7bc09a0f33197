"""The supervised warm start: next-token training on transcripts of training variations (`empo2 warmstart`).

A small model utters almost no valid action, so all returns of a group are equal and reinforcement learning cannot
begin. A few minutes on the environment's demonstrations, or on the recorded episodes of other runs
(`algorithms/imitation.py`), give it a real, mixed signal. Loss falls on the answers, and for a random policy, which has
to learn to copy at all, a little on the prompts; the learner and its batches are those of the RL update. The loss on
problems held out can end it early. This is a start, not the paper's method.
"""

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from empo2_jax import assembly, distributed
from empo2_jax.alarms import count_skipped
from empo2_jax.algorithms.imitation import Transcripts, hold_out, transcripts
from empo2_jax.assembly import Policy
from empo2_jax.checkpoint import CheckpointStore
from empo2_jax.checkpoint_files import check_writable
from empo2_jax.config import Config, UpdateConfig
from empo2_jax.config_offline import WarmstartConfig
from empo2_jax.data.packing import pack
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.evaluation import evaluate
from empo2_jax.learner.optim import warmstart_optimizer
from empo2_jax.learner.step import Learner, supervised_loss
from empo2_jax.metrics import write_atomically
from empo2_jax.models.hf_folder import new_folder
from empo2_jax.models.hf_weights import save_model
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.sharding import visible_devices
from empo2_jax.models.word_tokenizer import pieces_of, write_word_tokenizer
from empo2_jax.progress import RunProgress, note
from empo2_jax.randomness import generator
from empo2_jax.readers import read_json
from empo2_jax.rollout.chat import Chat
from empo2_jax.run_record import identity
from empo2_jax.types import Message, Mode, Row, TrainBatch

TRANSCRIPTS_FILE = "transcripts.json"  # beside the checkpoints of a start that is not at its end


@dataclass
class Progress:
    """How far a warm start is; all of it goes into its checkpoints."""

    updates: int = 0
    skipped: int = 0  # updates in a row, up to now
    losses: list[float] = field(default_factory=list)  # nats per weighted token, of every update that was not skipped
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (updates before, the same on the held-out ones)

    def best(self) -> int:
        """Updates before the lowest held-out loss; the first of equal ones."""
        return min(self.held_out, key=lambda point: point[1])[0]

    def ended(self, patience: int) -> bool:
        """Whether the last `patience` measurements (0: any number) brought no new best."""
        later = [updates for updates, _ in self.held_out if updates > self.best()] if patience else []
        return patience > 0 and len(later) >= patience


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
        CheckpointError: the folder cannot be written.
    """
    if not config.warmstart.updates:
        raise ConfigError("warmstart.updates = 0: this configuration has no warm start")
    gang = distributed.current()
    if not gang.first(folder.is_dir, "warm start"):
        gang.first(partial(check_writable, folder), "warm start")
        make = _take_shared if config.warmstart.shared_dir else make_start
        make(config, family, folder)
    origin = folder / "made_from.txt"
    if not origin.is_file() or origin.read_bytes() != _origin(config).encode():
        raise ConfigError(f"{folder}: made by another configuration; remove it or choose another folder")
    return folder


def _take_shared(config: Config, family: EnvironmentFamily, folder: Path) -> None:
    """Copy the start that runs with these settings share, made by the first of them; the others wait for it."""
    gang = distributed.current()
    sections = "evaluation.", "model.", "rollout."  # of its last bits and of `before.json`
    others = {key: value for key, value in identity(config).items() if key.startswith(sections)}
    name = hashlib.sha256(json.dumps([_origin(config), others], sort_keys=True).encode()).hexdigest()[:16]
    shared = Path(config.warmstart.shared_dir) / name

    def copy() -> None:
        with new_folder(folder) as work:
            shutil.copytree(shared, work, dirs_exist_ok=True)

    with ExitStack() as stack:
        gang.first(partial(_lock, shared.with_suffix(".lock"), stack), "warm start")
        if not gang.first(shared.is_dir, "warm start"):
            make_start(config, family, shared)
        gang.first(copy, "warm start")


def _lock(path: Path, stack: ExitStack) -> None:
    """Hold the file until `stack` ends, after whoever holds it; the kernel releases it with a process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(path.open("a+"))
    except OSError as error:
        raise ConfigError(f"warmstart.shared_dir = {path.parent}: cannot be written: {error.strerror}") from None
    fcntl.flock(file, fcntl.LOCK_EX)


def _seed(config: Config) -> int:
    return config.run.seed if config.warmstart.seed < 0 else config.warmstart.seed


def _origin(config: Config) -> str:
    """Hash of all settings that a start depends on."""
    seen = config.warmstart.variations or config.env.train_variations
    parts = {
        "seed": _seed(config),
        "model": config.model.path,
        "env": config.env.model_dump(exclude={"workers", "step_timeout_s"}) | {"train_variations": seen},
        "warmstart": config.warmstart.model_dump(exclude={"checkpoint_every", "seed", "shared_dir"}),
        "update": config.update.model_dump(include={"buckets", "micro_batch_tokens"}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def make_start(config: Config, family: EnvironmentFamily, folder: Path) -> None:
    """Warm-start the policy of `model.path`, or a random one, into a new Hugging Face folder, in one rename.

    `before.json` in the folder is the panel of the untrained policy, absent for a random one.
    """
    seed = _seed(config)
    begun = folder.with_name(f"{folder.name}.{_origin(config)[:12]}.partial")  # an interrupted one goes on there
    chats = _transcripts(config, family, seed, begun / TRANSCRIPTS_FILE)
    with tempfile.TemporaryDirectory(prefix="empo2-random-") as place:
        base = None
        if config.warmstart.init == "random":
            base = Path(place) / "policy"
            words = family.vocabulary()
            pieces = [] if words else pieces_of(message.content for chat in chats for message in chat)
            random_policy(config.warmstart, words or pieces, seed, base, pieces=not words)
        policy = assembly.load_policy(config.model, base)
        before = None if base else _evaluate_untrained(config, policy, family)
        note(f"warm start: {config.warmstart.updates} updates on {', '.join(config.warmstart.source)}")
        with RunProgress(config.warmstart.updates, unit="update") as progress:
            params, facts = train(
                policy,
                Chat(policy.tokenizer, family.system_prompt()),
                chats,
                config.warmstart,
                config.update,
                seed=seed,
                remat=config.model.remat,
                store=CheckpointStore(begun, keep=1),
                report=lambda done, loss: progress.update(done, {"warmstart/loss": loss}),
            )
        params = distributed.own_copy(params)

        def write() -> None:
            with new_folder(folder) as work:
                save_model(work, params, policy.model.config, tokenizer_folder=policy.folder)
                write_atomically(work / "losses.json", json.dumps(facts["progress"].pop("losses")))
                write_atomically(work / "imitation.json", json.dumps(facts))
                write_atomically(work / "made_from.txt", _origin(config))
                if before is not None:
                    write_atomically(work / "before.json", json.dumps(before))
            shutil.rmtree(begun, ignore_errors=True)

        distributed.current().first(write, "warm start")


def _evaluate_untrained(config: Config, policy: Policy, family: EnvironmentFamily) -> dict[str, Any]:
    note(f"evaluating on {config.evaluation.split}, without memory (before the warm start)")
    engine = assembly.make_engine(config, policy)
    with closing(engine):
        engine.load(policy.params, 0)
        with closing(assembly.make_collector(config, policy, engine, family)) as collector:
            panel = evaluate(collector, family, config.evaluation)
    return panel.record("before warm start", 0, config.evaluation.split)


def random_policy(
    config: WarmstartConfig, words: Sequence[str], seed: int, folder: Path, *, pieces: bool = False
) -> None:
    """Write an untrained model of the configured shape with a word-level tokenizer into a new folder."""
    tokenizer_folder = folder.with_name("tokenizer")
    size = write_word_tokenizer(tokenizer_folder, words, pieces=pieces)
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
    visible_devices()  # which says so where there are none
    params = nnx.split(Qwen2(shape, rngs=nnx.Rngs(seed)))[1]
    save_model(folder, params, shape, tokenizer_folder=tokenizer_folder)


def train(
    policy: Policy,
    chat: Chat,
    chats: Transcripts,
    config: WarmstartConfig,
    update: UpdateConfig,
    *,
    seed: int,
    remat: str,
    store: CheckpointStore,
    report: Callable[[int, float], None],
) -> tuple[Any, dict[str, Any]]:
    """Trained parameters, and the facts of the training: transcripts, `Progress`, the update whose weights they are.

    It goes on from the newest checkpoint of `store` and leaves one there every `checkpoint_every` updates.

    Raises:
        UpdateError: see `count_skipped`.
        ConfigError: too few problems to hold some out.
        DataError: no transcript fits the largest bucket.
    """
    learned, apart = hold_out(chats, config.held_out, seed)
    rows, measured = (_rows(chat, part, config.context_weight, update.buckets[-1]) for part in (learned, apart))
    if not rows or (apart and not measured):
        raise DataError(f"warmstart: no transcript fits the largest of update.buckets = {update.buckets[-1]}")
    if left_out := len(chats) - len(rows) - len(measured):
        longest = f"the largest of update.buckets = {update.buckets[-1]}"
        note(f"warm start: {left_out} of {len(chats)} transcripts are longer than {longest}, and left out")
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

    def batches(chosen: Sequence[Row]) -> Sequence[TrainBatch]:
        """Packed, weights summing up to 1."""
        tokens = float(sum(row.token_weight.sum() for row in chosen))
        scaled = [_scaled(row, 1.0 / tokens) for row in chosen]
        return pack(scaled, update.buckets, update.micro_batch_tokens, learner.row_multiple).batches

    state = learner.init(_copy(params))
    best = _copy(params) if config.patience else None
    held_out = batches(measured) if measured else ()
    done = Progress()
    newest = store.latest()
    if newest is not None:
        (state, best), _, cursor = store.restore(newest, (state, best))
        done = Progress(**cursor["progress"] | {"held_out": [(k, loss) for k, loss in cursor["progress"]["held_out"]]})
    elif measured:
        done.held_out.append((0, _loss(learner, params, held_out)))
    order: list[int] = []
    for number in range(config.updates):
        while len(order) < config.batch_episodes:
            order += generator(seed, "warmstart-order", number, len(order)).permutation(len(rows)).tolist()
        batch, order = [rows[index] for index in order[: config.batch_episodes]], order[config.batch_episodes :]
        if number < done.updates:
            continue  # this batch was learned before the interruption
        if done.ended(config.patience):
            break
        state, sums = learner.update(state, batches(batch))
        done.updates, last = number + 1, number + 1 == config.updates
        done.skipped = count_skipped(done.skipped, bool(sums["skipped"]), f"warm start, update {done.updates}")
        loss = float(sums["loss"])
        done.losses += [] if done.skipped else [loss]
        report(done.updates, loss)
        if measured and (last or done.updates % config.held_out_every == 0):
            done.held_out.append((done.updates, _loss(learner, state.params, held_out)))
            best = _copy(state.params) if best is not None and done.best() == done.updates else best
        if config.checkpoint_every and done.updates % config.checkpoint_every == 0 and not last:
            cursor = {"progress": asdict(done), "metrics_lines": 0}
            store.save(done.updates, state=(state, best), dumps={}, cursor=cursor)
    kept = done.best() if best is not None else done.updates
    facts = {"transcripts": len(rows), "held_out": len(measured), "kept_update": kept, "progress": asdict(done)}
    return state.params if best is None else best, facts


def _transcripts(config: Config, family: EnvironmentFamily, seed: int, kept: Path) -> list[list[Message]]:
    """As an interrupted start left them in `kept`: simulators take as long to play them as the training takes."""
    if kept.is_file():
        return read_json(kept, list[list[Message]])
    chats = _played(config, family, seed)
    if distributed.current().writes:
        write_atomically(kept, json.dumps([[asdict(message) for message in chat] for chat in chats]))
    return chats


def _played(config: Config, family: EnvironmentFamily, seed: int) -> list[list[Message]]:
    """Of the family's training problems, or of `warmstart.variations` of them."""
    if not config.warmstart.variations:
        return transcripts(family, config.warmstart, seed)
    env = config.env.model_copy(update={"train_variations": config.warmstart.variations})
    with closing(assembly.make_family(config.model_copy(update={"env": env}))) as wider:
        return transcripts(wider, config.warmstart, seed)


def _rows(chat: Chat, chats: Transcripts, context_weight: float, longest: int) -> list[Row]:
    rows = [answer_row(chat, item, context_weight) for item in chats]
    return [row for row in rows if len(row.token_ids) <= longest]


def _loss(learner: Learner, params: Any, batches: Sequence[TrainBatch]) -> float:
    """The supervised loss without a gradient."""
    return -float(sum((batch.token_weight * learner.logprobs(params, batch)[0]).sum() for batch in batches))


def _copy(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy(), params)


def _scaled(row: Row, factor: float) -> Row:
    return replace(row, token_weight=row.token_weight * np.float32(factor))
