"""What the trainer gives to rollout servers: the engine over them, weights as folders, and its own view of a canary.

The rollout side knows neither JAX nor the model (`rollout/sglang.py`); this is where both meet. Servers must see the
folder under the same path.
"""

import os
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

from empo2_jax import distributed
from empo2_jax.config import Config, names_user
from empo2_jax.errors import ConfigError
from empo2_jax.learner.optim import policy_optimizer
from empo2_jax.learner.step import Learner, supervised_loss
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.readers import read_text
from empo2_jax.rollout.sglang import SglangEngine
from empo2_jax.rollout.sglang_client import Access
from empo2_jax.rollout.sglang_member import PoolSettings
from empo2_jax.sync.bundle import read_bundle
from empo2_jax.sync.manifest import VERSIONS_KEPT, versions
from empo2_jax.sync.orbax_publish import Publisher
from empo2_jax.types import TrainBatch

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
        model=model.config,
        canary_ids=ids,
        canary_tolerance=config.canary_tolerance,
        publish=PublishedWeights(weights.resolve(), model.config, dtype=dtype, tokenizer_folder=folder),
        score=canary_scorer(config, model, mesh, ids),
        validate=partial(read_bundle, model_config=model.config),
        processes=distributed.current(),
        router=rollout.router,
    )


def server_urls(servers: tuple[str, ...]) -> list[str]:
    """URLs themselves, or the lines of a file."""
    if len(servers) == 1 and "://" not in servers[0]:
        path = Path(servers[0])
        if not path.is_file():
            raise ConfigError(f"rollout.servers = {servers[0]!r}: neither a URL nor a file with URLs, one a line")
        servers = tuple(line.strip() for line in read_text(path, ConfigError).splitlines() if line.strip())
    wrong = [url for url in servers if not url.startswith(("http://", "https://"))]
    if wrong or not servers:
        raise ConfigError(
            f"rollout.servers: {wrong[0] if wrong else 'nothing'!r}; http:// or https:// URLs are allowed"
        )
    if any(map(names_user, servers)):
        raise ConfigError(
            "rollout.servers: no user and key in a URL, since logs show it; $EMPO2_API_KEY (rollout.api_key_env) has it"
        )
    if len(set(servers)) < len(servers):
        raise ConfigError("rollout.servers: a URL occurs twice; every server once is allowed")
    return list(servers)


class PublishedWeights:
    """Versions under one folder, as `rollout.weights.Publish`; one run writes at a time, all its processes together."""

    def __init__(self, root: Path, config: Qwen2Config, *, dtype: str, tokenizer_folder: Path):
        self._root = root
        self._publisher = Publisher(
            root, config, dtype=dtype, keep=VERSIONS_KEPT, tokenizer_folder=tokenizer_folder, orbax=False
        )

    def __call__(self, params: Any, policy_version: int) -> Path:
        """Write a version; newer ones, of a run that went back, are set aside."""
        newest = distributed.current().first(lambda: max(versions(self._root), default=-1), "published versions")
        if newest >= policy_version:
            self._publisher.set_aside_from(policy_version)
        return self._publisher.publish(params, policy_version).wait()

    def close(self) -> None:
        """Give the folder free."""
        self._publisher.close()


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
