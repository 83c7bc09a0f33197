"""What the trainer gives to rollout servers: the engine over them, weights as folders, and its own view of a canary.

The rollout side knows neither JAX nor the model (`rollout/sglang.py`); this is where both meet. Servers must see the
folder under the same path.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float32, Int32
from safetensors import SafetensorError, safe_open

from empo2_jax.config import Config
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.learner.optim import policy_optimizer
from empo2_jax.learner.step import Learner, supervised_loss
from empo2_jax.models.hf_weights import named, save_model
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.rollout.sglang import SglangEngine
from empo2_jax.rollout.sglang_client import Access
from empo2_jax.rollout.sglang_pool import PoolSettings
from empo2_jax.types import TrainBatch

VERSIONS_KEPT = 3  # a server may still read the one before the last
CANARY_IDS = 32
CANARY_TEXT = (
    "You are in a kitchen. On the table is a glass of water and a metal pot; the stove is off. Your task is to boil "
    "water. First open the door to the hallway, then look around and read the thermometer."
)


def make_remote_engine(
    config: Config, model: Qwen2, tokenizer: Tokenizer, folder: Path, mesh: Mesh, max_length: int
) -> SglangEngine:
    """The engine over `rollout.servers`; nothing is asked of them yet.

    Args:
        config: The experiment.
        model: Architecture, and where its parameters lie.
        tokenizer: Of the policy.
        folder: Whose tokenizer files go along with the weights.
        mesh: Of the parameters.
        max_length: Tokens of an episode and its tip.

    Raises:
        ConfigError: the servers' file cannot be read or has something else than URLs; the path of the weights cannot
            be given to servers.
    """
    rollout = config.rollout
    weights = Path(rollout.weights_dir) if rollout.weights_dir else config.run_dir / "weights"
    if set("*?[") & set(str(weights.resolve())):
        raise ConfigError(
            f"rollout.weights_dir = {weights}: servers search it with a pattern; no *, ? and [ is allowed"
        )
    dtype, ids = config.served_dtype, canary_ids(tokenizer)
    names = {name: value.shape for name, value in named(nnx.split(model)[1]).items()}
    return SglangEngine(
        server_urls(rollout.servers),
        access=Access(
            api_key=os.environ.get(rollout.api_key_env, ""),
            admin_key=os.environ.get(rollout.admin_key_env, ""),
            api_key_name=f"the key in ${rollout.api_key_env}",
            admin_key_name=f"the key in ${rollout.admin_key_env}",
            request_s=rollout.request_timeout_s,
            control_s=rollout.control_timeout_s,
        ),
        settings=PoolSettings(
            in_flight=rollout.in_flight,
            attempts=rollout.attempts,
            recovery_s=rollout.recovery_timeout_s,
            mixed_versions=rollout.mixed_versions,
            seed=config.run.seed,
        ),
        max_length=max_length,
        vocab_size=model.config.vocab_size,
        canary_ids=ids,
        canary_tolerance=config.canary_tolerance,
        publish=partial(publish, weights, model=model, tokenizer_folder=folder, dtype=dtype),
        score=canary_scorer(config, model, mesh, ids),
        validate=partial(check_weights, shapes=names),
        router=rollout.router,
    )


def server_urls(servers: tuple[str, ...]) -> list[str]:
    """URLs themselves, or the lines of a file."""
    if len(servers) == 1 and "://" not in servers[0]:
        path = Path(servers[0])
        if not path.is_file():
            raise ConfigError(f"rollout.servers = {servers[0]!r}: neither a URL nor a file with URLs, one a line")
        servers = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    wrong = [url for url in servers if not url.startswith(("http://", "https://"))]
    if wrong or not servers:
        raise ConfigError(
            f"rollout.servers: {wrong[0] if wrong else 'nothing'!r}; http:// or https:// URLs are allowed"
        )
    if len(set(servers)) < len(servers):
        raise ConfigError("rollout.servers: a URL occurs twice; every server once is allowed")
    return list(servers)


def publish(
    weights: Path, params: Any, policy_version: int, *, model: Qwen2, tokenizer_folder: Path, dtype: str
) -> Path:
    """Write a version as a Hugging Face folder, complete or not at all, and remove all but the newest few.

    A folder that is there already keeps its name: a run that went back writes other weights under the old number.
    """
    existing = [path for path in weights.glob("v*-*") if path.is_dir()]
    stem = f"v{policy_version:06d}"
    attempts = [int(path.name.removeprefix(f"{stem}-")) for path in existing if path.name.startswith(f"{stem}-")]
    folder = weights / f"{stem}-{max(attempts, default=-1) + 1}"
    save_model(folder.resolve(), params, model.config, dtype=jnp.dtype(dtype), tokenizer_folder=tokenizer_folder)
    by_age = sorted(existing, key=lambda path: path.stat().st_mtime_ns)
    for path in by_age[: max(0, len(by_age) + 1 - VERSIONS_KEPT)]:
        shutil.rmtree(path, ignore_errors=True)
    return folder.resolve()


def check_weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse a folder whose files are truncated or have other tensors than `shapes`; raises `DataError`.

    Only headers and sizes are read: values are the canary's business.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: truncated or not a safetensors file: {error}") from None
    for name in sorted(shapes.keys() ^ found.keys()):
        raise DataError(f"{folder}: tensor {name} is {'missing' if name in shapes else 'unknown to the model'}")
    for name, shape in shapes.items():
        if found[name] != shape:
            raise DataError(f"{folder}: tensor {name} has shape {found[name]}, the model asks for {shape}")


def canary_ids(tokenizer: Tokenizer) -> Int32[np.ndarray, " canary"]:
    """A fixed prompt: plain words, or, where the vocabulary knows too few of them, ids spread over all of it."""
    ids = tokenizer.encode(CANARY_TEXT)[:CANARY_IDS]
    if len(set(ids)) < CANARY_IDS // 2:
        # Without the last id: SGLang 0.5.23 scores 0 in the place of the last row of the embedding.
        return np.linspace(0, tokenizer.size - 2, CANARY_IDS).astype(np.int32)
    return np.asarray(ids, np.int32)


def canary_scorer(
    config: Config, model: Qwen2, mesh: Mesh, ids: Int32[np.ndarray, " canary"]
) -> Callable[[Any], Float32[np.ndarray, " scored"]]:
    """The trainer's log-probs of `ids[1:]` at temperature 1 under given parameters, nats, by its own forward pass."""
    learner = Learner(
        nnx.split(model)[0], policy_optimizer(config.update), supervised_loss, temperature=1.0, remat="none", mesh=mesh
    )
    shape = (learner.row_multiple, len(ids))
    rows, zeros = np.tile(ids, (shape[0], 1)), np.zeros(shape, np.float32)
    mask = np.ones(shape, bool)
    mask[:, 0] = False
    batch = TrainBatch(
        token_ids=rows,
        segment_ids=np.ones(shape, np.int32),
        positions=np.tile(np.arange(len(ids), dtype=np.int32), (shape[0], 1)),
        loss_mask=mask,
        mode=np.zeros(shape, np.int8),
        advantages=zeros,
        denominator_logprobs=zeros,
        rollout_weight=zeros,
        token_weight=zeros,
        mask_threshold=zeros,
        reference_logprobs=zeros,
    )

    def score(params: Any) -> Float32[np.ndarray, " scored"]:
        if config.served_dtype == "bfloat16":  # as servers have them
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), params)
        return learner.logprobs(params, batch)[0][0, 1:]

    return score
