"""`empo2 serve`: one process that serves a Hugging Face folder through SGLang's native HTTP API, with our engine.

The socket is bound before the weights are read (a taken port costs nothing), and the address is printed once requests
are answered. SIGTERM or Ctrl-C ends it: at once while it loads; later no new requests are taken, those there are get a
time to finish, the rest is given back as aborted, exit code 0.

Weights are kept as the model computes with them: matrices in the compute dtype, norms in f32.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import uvicorn
from flax import nnx
from jax.sharding import Mesh

from empo2_jax.errors import ConfigError, DataError
from empo2_jax.interrupts import ended_at_once
from empo2_jax.models.hf_weights import load_model
from empo2_jax.models.qwen2 import Qwen2, Qwen2Config
from empo2_jax.models.qwen2_config import read_config
from empo2_jax.models.sharding import make_mesh, visible_devices
from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.randomness import words
from empo2_jax.readers import read_json
from empo2_jax.rollout.base import Request, Sampling
from empo2_jax.rollout.batching import Batcher
from empo2_jax.rollout.http_api import Limits, Served, make_app
from empo2_jax.rollout.jax_engine import JaxEngine
from empo2_jax.rollout.serve_options import DTYPES, ServeOptions
from empo2_jax.rollout.wire import Model

DEFAULT_LENGTH = 4096  # tokens of a slot, where the model has more positions
KEEP_ALIVE_S = 600  # a trainer asks again after its update; closing earlier races with that request
ABORT_S = 5.0  # for aborted requests to be answered


def serve(options: ServeOptions) -> int:
    """Serve until a signal; returns the exit code.

    Raises:
        ConfigError: the address cannot be had, or the folder does not fit the options.
        DataError: the folder cannot be read.
        MemoryError | RuntimeError: the engine failed, most likely for want of memory.
    """
    with _listening(options.host, options.port) as listener:
        with ended_at_once():
            served = _load(options)
        config = uvicorn.Config(
            make_app(served, options.api_key),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(options.grace_s + ABORT_S) + 1,
        )
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{host}:{listener.getsockname()[1]}"
        asyncio.run(_Server(config, served, options.grace_s, address).run_until_stopped(listener))
    if served.batcher.failure:
        raise served.batcher.failure
    return 0 if served.draining else 1


class _Server(uvicorn.Server):
    """Uvicorn with our way to end: signals drain the engine first and leave the exit code alone."""

    def __init__(self, config: uvicorn.Config, served: Served, grace_s: float, address: str):
        super().__init__(config)
        self._served, self._grace_s, self._address = served, grace_s, address

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Ours are the loop's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say where, once connections are accepted."""
        await super().startup(sockets)
        print(f"serving {self._address}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        """End when the engine's thread has."""
        return await super().on_tick(counter) or not self._served.batcher.alive

    async def run_until_stopped(self, listener: socket.socket) -> None:
        """Accept connections until a signal, or until the engine's thread has ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        await self.serve([listener])
        self._served.batcher.close(0.0)
        self._served.batcher.join(ABORT_S)

    def _drain(self) -> None:
        if not self._served.draining:
            self._served.draining = True
            self._served.batcher.close(self._grace_s)
            self.should_exit = True


def _listening(host: str, port: int) -> socket.socket:
    """A bound socket; it is listened to once there is something to answer with."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: cannot be had: {error.strerror}") from None
    return listener


def _load(options: ServeOptions) -> Served:
    """Model, tokenizer and engine of a folder, warmed up, behind a batcher."""
    folder = options.folder
    config, tokenizer = read_config(folder), Tokenizer.load(folder)
    tokenizer.check_fits(config.vocab_size, folder)
    length = options.max_length or min(config.max_position_embeddings, DEFAULT_LENGTH)
    if length > config.max_position_embeddings:
        raise ConfigError(f"--max-length {length}: the model has {config.max_position_embeddings} positions")
    dtype = options.dtype or _stored_dtype(folder)
    mesh = None
    if options.data * options.tensor > 1:
        mesh = make_mesh(visible_devices(), options.data, 1, options.tensor)
    model = _read(folder, config, dtype, mesh)
    engine = JaxEngine(model, slots=options.slots, max_length=length, mesh=mesh)
    sampling = Sampling(1, 1.0, (), banned_from=tokenizer.size)
    engine.generate([Request("", np.zeros(1, np.int32), words(0, "warm-up"), sampling)])
    engine.flush()
    place = str(folder.resolve())
    return Served(
        batcher=Batcher(engine, burst=options.burst),
        model=Model(config.vocab_size, tokenizer.size, length, tokenizer.stop_ids),
        decode=tokenizer.decode,
        read=lambda path: nnx.split(_read(Path(path), config, dtype, mesh))[1],
        install=engine.load,
        checksums=engine.checksums,
        info={"model_path": place, "tokenizer_path": place, "is_generation": True, "model_type": "qwen2"},
        settings={
            "version": version("empo2_jax"),
            "model_path": place,
            "dtype": dtype,
            "context_length": length,
            "max_running_requests": options.slots,
            "max_queued_requests": options.max_waiting,
            "dp_size": options.data,
            "tp_size": options.tensor,
        },
        limits=Limits(options.max_waiting, options.max_body_mb << 20),
        weight_version=options.weight_version,
    )


def _read(folder: Path, config: Qwen2Config, dtype: str, mesh: Mesh | None) -> Qwen2:
    """A folder's model as it is served; every file, name and shape is checked before anything is replaced.

    Raises:
        DataError: a file cannot be read or is another architecture's.
    """
    try:
        if differences := config.differences(read_config(folder)):
            name, wanted, found = differences[0]
            raise DataError(f"{folder}: config.json has {name} {found}, the served model {wanted}")
        graphdef, params = nnx.split(load_model(folder, dtype=jnp.dtype(dtype), mesh=mesh))
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror}") from None
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, params))


def _stored_dtype(folder: Path) -> str:
    """The dtype that config.json names; f32 where it names none or one that is not computed in."""
    config = read_json(folder / "config.json", dict[str, Any])
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if dtype in DTYPES else DTYPES[0]
