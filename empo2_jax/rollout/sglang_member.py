"""What the pool knows of one server, how patient it is, and whether a server can serve the policy at all."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from empo2_jax.errors import ConfigError, EngineError
from empo2_jax.models.qwen2_config import Qwen2Config, read_config
from empo2_jax.randomness import uniform
from empo2_jax.rollout.sglang_client import SglangServer

MAX_DELAY_S = 30.0
SPARE_TOKENS = 8  # that SGLang keeps free of the context it has


@dataclass(frozen=True)
class PoolSettings:
    """How patient the pool is."""

    in_flight: int = 64  # requests at a time and server
    attempts: int = 5  # of one request
    backoff_s: float = 1.0  # before the second attempt; doubles
    recovery_s: float = 300.0  # without any server
    mixed_versions: bool = False  # whether one episode may be sampled by several versions
    seed: int = 0

    def delay_s(self, who: str, attempt: int) -> float:
        """Exponential back-off with jitter of ± a half, the same in every run of the seed."""
        longest = min(self.backoff_s * 2.0 ** min(attempt, 16), MAX_DELAY_S)
        return longest * (0.5 + uniform(self.seed, "backoff", who, attempt))


@dataclass(eq=False)
class Member:
    """A server and what the pool knows of it."""

    server: SglangServer
    gate: asyncio.Semaphore
    ready: bool = False
    reason: str = "was not asked yet"  # why it is not ready
    load: int = 0  # requests sent to it or waiting for its gate
    doubts: int = 0  # how often its weights were in doubt; what it was asked before is then not believed
    nurse: asyncio.Task[None] | None = field(default=None, repr=False)


async def unfit(members: Iterable[Member], model: Qwen2Config, length: int) -> dict[Member, ConfigError]:
    """Those that `check_server` refuses, with the reason; one that does not answer will fail its load."""
    found: dict[Member, ConfigError] = {}

    async def one(member: Member) -> None:
        try:
            await check_server(member.server, model, length)
        except ConfigError as error:
            found[member] = error
        except EngineError:
            return

    await asyncio.gather(*map(one, members))
    return found


async def check_server(server: SglangServer, model: Qwen2Config, length: int) -> None:
    """Before weights are loaded: is it a server of this model, with room for episodes of `length` tokens?

    It may be another one than the last time.

    A real server dies of weights of other shapes, so the model's folder that it names is compared, where it can be seen
    from here.

    Raises:
        ConfigError: it is not.
    """
    info = await server.info()
    room, folder = info.get("max_req_input_len"), Path(str(info.get("model_path") or "."))
    if isinstance(room, int) and room + SPARE_TOKENS < length:
        raise ConfigError(
            f"{server.url}: takes prompts of at most {room} tokens, episodes with their tip have up to "
            f"{length}: lower rollout.max_length or start the server with more room"
        )
    if not (folder / "config.json").is_file():
        return
    for name, wanted, found in model.differences(read_config(folder)):
        raise ConfigError(
            f"{server.url}: serves another model: {name} {found}, the trainer has {wanted}; start it with the "
            f"policy's folder instead of {folder}"
        )


async def stop(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end."""
    tasks = [task for task in tasks if not task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
