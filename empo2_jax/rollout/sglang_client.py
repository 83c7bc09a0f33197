"""One SGLang server over its native HTTP API: ids in, ids out, every call with a deadline.

Answers and failures are typed in `sglang_replies`; which server is asked, how often and when is `sglang_pool`; the
order of the calls that bring new weights is `weights`.
"""

import asyncio
import ssl
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn

import httpx
import numpy as np
from jaxtyping import Float32

from empo2_jax.rollout.base import MEMORY_PARTS, MemoryPart, Sampling
from empo2_jax.rollout.chat import TokenIds
from empo2_jax.rollout.sglang_replies import (
    Busy,
    Denied,
    Lost,
    Refused,
    Reply,
    ServerFault,
    error_text,
    parse_completion,
    parse_metrics,
    parse_object,
    parse_score,
)

PauseMode = Literal["abort", "retract"]


@dataclass(frozen=True)
class Access:
    """Keys and deadlines of a server; keys stay out of every representation."""

    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)  # empty = the API key
    api_key_name: str = "the API key"  # how errors call them
    admin_key_name: str = "the admin key"
    connect_s: float = 10.0  # also of calls that only ask how the server is
    request_s: float = 300.0  # of one completion
    control_s: float = 600.0  # of one control call; loading weights is the longest


@cache
def _certificates() -> ssl.SSLContext:
    """One for all clients: reading the system's certificates takes 0.1 s."""
    return ssl.create_default_context()


class SglangServer:
    """Calls of one server, or (only `generate` and `abort`) of a router in front of several.

    Every method raises an `EngineError` of `sglang_replies`: `Lost`, `ServerFault`, `Busy`, `Refused` or `Denied`.
    """

    def __init__(self, url: str, access: Access):
        self.url = url.rstrip("/")
        self._access = access
        timeout = httpx.Timeout(None, connect=access.connect_s)
        many = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)
        self._data = httpx.AsyncClient(timeout=timeout, limits=many, trust_env=False, verify=_certificates())
        # A connection of its own for every control call: one that breaks says that the server died, not that it idled.
        single = httpx.Limits(max_keepalive_connections=0)
        self._control = httpx.AsyncClient(timeout=timeout, limits=single, trust_env=False, verify=_certificates())

    def __repr__(self) -> str:
        return f"SglangServer({self.url})"

    async def close(self) -> None:
        """Close the connections."""
        await self._data.aclose()
        await self._control.aclose()

    async def generate(self, rid: str, prompt: TokenIds, sampling: Sampling, key: int, vocab_size: int) -> Reply:
        """Sample one completion.

        Args:
            rid: Name by which `abort` finds the request.
            prompt: Token ids, each inside the vocabulary: one outside can kill the server.
            sampling: How to sample.
            key: 64 bits that name the draw; a server without reproducible sampling ignores them.
            vocab_size: Answered ids are below this.
        """
        parameters = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_ids),
            "sampling_seed": key % 2**63,
        }
        # `sampling_key` is a word of `empo2 serve`, which then draws as the engine in the trainer's process would.
        body = {"rid": rid, "input_ids": prompt.tolist(), "sampling_params": parameters}
        body |= {"sampling_key": [key >> 32, key % 2**32]}
        reply = await self._generate(body | {"return_logprob": True, "logprob_start_len": -1})
        return parse_completion(self.url, reply, sampling.max_tokens, vocab_size)

    async def score(self, ids: TokenIds) -> tuple[Float32[np.ndarray, " scored"], str]:
        """Log-probs at temperature 1 of all ids but the first, nats, and the label of the weights that gave them."""
        body = {"input_ids": ids.tolist(), "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
        reply = await self._generate(body | {"return_logprob": True, "logprob_start_len": 0})
        return parse_score(self.url, reply, ids)

    async def ready(self) -> bool:
        """Whether the server takes requests; False also where it cannot be reached."""
        try:
            await self._ask("/ready", "/health")
        except (ServerFault, Busy):
            return False
        return True

    async def version(self) -> str:
        """Label of the weights that the server says it serves."""
        info = parse_object(self.url, await self._ask("/model_info", "/get_model_info"))
        return str(info.get("weight_version", ""))

    async def info(self) -> dict[str, Any]:
        """What the server says about itself."""
        return parse_object(self.url, await self._ask("/server_info", "/get_server_info"))

    async def update_weights(self, folder: Path, label: str) -> None:
        """Load a folder and drop the prefix cache.

        Raises:
            Refused: it was not loaded; which does not mean that the weights are still the old ones.
            Lost: the connection broke: the server is dead, and this folder may be why.
        """
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        reply = parse_object(self.url, await self._post("/update_weights_from_disk", body))
        if reply.get("success") is not True:
            raise Refused(f"{self.url}: {folder} was not loaded: {str(reply.get('message', reply))[:300]}")

    async def flush(self) -> None:
        """Drop the prefix cache; `Refused` while requests run."""
        await self._post("/flush_cache", None)

    async def pause(self, mode: PauseMode) -> None:
        """Hold new requests back; running ones are ended (`abort`) or resumed later with a new cache (`retract`)."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._post("/continue_generation", {})

    async def abort(self, rid: str) -> None:
        """Ask to end a request; nothing says when that has happened."""
        await self._call("POST", "/abort_request", {"rid": rid}, limit_s=self._access.connect_s)

    async def checksums(self) -> dict[str, Any] | None:
        """Checksums of the served parameters; None where the server has no such call."""
        try:
            return parse_object(self.url, await self._post("/weights_checker", {"action": "checksum"}))
        except Refused:
            return None

    async def relabel(self, label: str) -> None:
        """Another label for the weights that are there."""
        await self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def release_memory(self, tags: tuple[MemoryPart, ...] = MEMORY_PARTS) -> None:
        """Give GPU memory back to a trainer on the same chips; the server must run with its memory saver, and idle."""
        await self._post("/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: tuple[MemoryPart, ...] = MEMORY_PARTS) -> None:
        """Take it again, all that was given back; weights must then be loaded anew."""
        await self._post("/resume_memory_occupation", {"tags": list(tags)})

    async def metrics(self) -> dict[str, float]:
        """Prometheus samples, summed by name over their labels; {} where the server has them switched off."""
        try:
            return parse_metrics(await self._call("GET", "/metrics", limit_s=self._access.connect_s))
        except Refused:
            return {}

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        text = await self._call("POST", "/generate", body, data=True, limit_s=self._access.request_s)
        return parse_object(self.url, text)

    async def _post(self, path: str, body: Any) -> str:
        return await self._call("POST", path, body, limit_s=self._access.control_s)

    async def _ask(self, path: str, older: str) -> str:
        """GET something cheap under its name of today, or under the one of older servers."""
        try:
            return await self._call("GET", path, limit_s=self._access.connect_s)
        except Refused as refusal:
            if refusal.status != 404:
                raise
            return await self._call("GET", older, limit_s=self._access.connect_s)

    async def _call(self, method: str, path: str, body: Any = None, *, data: bool = False, limit_s: float) -> str:
        access, client, where = self._access, self._data if data else self._control, self.url + path
        admin = not data and method == "POST" and bool(access.admin_key)
        key = access.admin_key if admin else access.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with asyncio.timeout(limit_s):
                response = await client.request(method, where, json=body, headers=headers)
        except TimeoutError:
            raise Lost(f"{where}: no answer within {limit_s:g} s") from None
        except httpx.ConnectTimeout:
            raise Lost(f"{where}: no connection within {access.connect_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeDecodeError) as error:
            raise Lost(f"{where}: {error or type(error).__name__}") from None
        if response.is_success:
            return response.text
        self._fail(where, response, access.admin_key_name if admin else access.api_key_name)

    def _fail(self, where: str, response: httpx.Response, key_name: str) -> NoReturn:
        status = response.status_code
        text = f"{where}: {error_text(response.text)} ({status})"
        if status in (401, 403):
            raise Denied(
                f"{where}: {key_name} was refused ({status}); set it to the key that the server was started with"
            )
        if status in (408, 429, 503):
            wait = response.headers.get("retry-after", "")
            raise Busy(text, float(wait) if wait.isdecimal() else 0.0)
        if 400 <= status < 500:
            raise Refused(text, status)
        raise ServerFault(text)
