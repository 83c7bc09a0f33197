"""SGLang's native HTTP API over a `Batcher`: routes, keys, limits; JSON in and out.

Errors are {"error": {"message"}}. Differences from SGLang, each on the safe side: an update is refused whole (old
weights stay) where its cache cannot be flushed; `flush_cache = false` spares only the running requests of a pause
`in_place`, new requests never see KV of older weights; a request whose client has gone away is aborted; memory that
was given back is never touched: requests are refused until it was resumed and, after its weights went, loaded anew.

Not here: JSON to jobs (`wire.py`), the process (`serve.py`).
"""

import asyncio
import hashlib
import hmac
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from empo2_jax.errors import Empo2Error, EngineError, in_one_line
from empo2_jax.randomness import words
from empo2_jax.rollout.base import MEMORY_PARTS, MemoryPart
from empo2_jax.rollout.batching import Batcher, PauseMode, Ticket
from empo2_jax.rollout.wire import Asked, Model, parse, parse_generate, reply

OPEN_PATHS = frozenset({"/ready", "/health"})  # answered without a key: load balancers have none
RETRY_AFTER_S = 1


class UpdateBody(BaseModel):
    """`/update_weights_from_disk`; without `weight_version` the label stays."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model_path: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    load_format: Literal["auto", "safetensors"] | None = None


class PauseBody(BaseModel):
    """`/pause_generation`."""

    mode: PauseMode = "abort"


class AbortBody(BaseModel):
    """`/abort_request`."""

    rid: str | None = None
    abort_all: bool = False


class MemoryBody(BaseModel):
    """`/release_memory_occupation` and `/resume_memory_occupation`; without tags everything."""

    tags: list[MemoryPart] | None = None


class VersionBody(BaseModel):
    """`/update_weight_version`: another label for the weights that are there."""

    new_version: str
    abort_all_requests: bool = True


class CheckerBody(BaseModel):
    """`/weights_checker`; of SGLang's actions this one."""

    action: Literal["checksum"] = "checksum"


class EmptyBody(BaseModel):
    """Of requests without fields."""


@dataclass(frozen=True)
class Limits:
    """What the server takes before it refuses."""

    waiting: int  # requests without a slot
    body_bytes: int


@dataclass
class Served:
    """What the routes need: the engine's thread, the model, and how to read and install weights."""

    batcher: Batcher
    model: Model
    decode: Callable[[list[int]], str]  # ids to text
    read: Callable[[str], Any]  # a folder to verified weights; Empo2Error where they do not fit
    install: Callable[[Any, int], None]  # weights and their number, in the engine's thread
    checksums: Callable[[], Mapping[str, str]]  # of the served tensors by name
    info: Mapping[str, Any]  # of /model_info
    settings: Mapping[str, Any]  # of /server_info
    limits: Limits
    weight_version: str = "default"
    labels: list[str] = field(default_factory=list)  # of the weights by their number
    draining: bool = False
    holds_weights: bool = True  # False from giving their memory back to the next load

    def __post_init__(self) -> None:
        self.labels.append(self.weight_version)
        self.updating = asyncio.Lock()
        self._session, self._count = secrets.randbits(64), itertools.count()

    def fresh(self) -> tuple[str, Any]:
        """A new rid and a new key: no request without a seed repeats another, also after a restart."""
        return secrets.token_hex(16), words(self._session, "serve", next(self._count))


def make_app(served: Served, api_key: str | None) -> ASGIApp:
    """The application; with a key, all but `OPEN_PATHS` ask for it."""
    routes = [
        ("/generate", _generate, ["POST"]),
        ("/ready", _ready, ["GET"]),
        ("/health", _ready, ["GET"]),
        ("/model_info", _model_info, ["GET"]),
        ("/get_model_info", _model_info, ["GET"]),
        ("/server_info", _server_info, ["GET"]),
        ("/get_server_info", _server_info, ["GET"]),
        ("/metrics", _metrics, ["GET"]),
        ("/update_weights_from_disk", _update, ["POST"]),
        ("/flush_cache", _flush, ["GET", "POST"]),
        ("/pause_generation", _pause, ["POST"]),
        ("/continue_generation", _continue, ["POST"]),
        ("/abort_request", _abort, ["POST"]),
        ("/update_weight_version", _update_version, ["POST"]),
        ("/weights_checker", _check_weights, ["POST"]),
        ("/release_memory_occupation", _release_memory, ["POST"]),
        ("/resume_memory_occupation", _resume_memory, ["POST"]),
    ]
    app = Starlette(
        routes=[Route(path, endpoint, methods=methods) for path, endpoint, methods in routes],
        exception_handlers={
            Empo2Error: _refused,
            ClientDisconnect: lambda request, error: Response(status_code=400),
            500: lambda request, error: problem(500, "internal error, see the server's output"),
            404: lambda request, error: problem(404, f"no such path: {request.url.path}"),
            405: lambda request, error: problem(405, f"{request.url.path} does not take {request.method}"),
        },
    )
    app.state.served = served
    return _Keyed(app, api_key)


def problem(status: int, message: str, **headers: str) -> JSONResponse:
    """An error reply."""
    return JSONResponse(
        {"error": {"message": message}}, status, {key.replace("_", "-"): headers[key] for key in headers}
    )


class _Keyed:
    """Asks for `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str | None):
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._key is None or scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, f"Bearer {self._key}".encode()):
            return await self._app(scope, receive, send)
        return await problem(401, "an API key is needed: Authorization: Bearer KEY")(scope, receive, send)


async def _refused(request: Request, error: Exception) -> Response:
    served = _served(request)
    status = 400 if served.batcher.alive and not served.draining else 503
    return problem(status, " ".join(str(error).split()))


def _served(request: Request) -> Served:
    return request.app.state.served


async def _body(request: Request) -> bytes | None:
    """The body, or None where it is too large."""
    most = _served(request).limits.body_bytes
    if int(request.headers.get("content-length", "0")) > most:
        return None
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > most:
            return None
    return bytes(content)


def _with_body(endpoint: Callable[[Request, bytes], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that is called with its body, if that is within the limit."""

    async def call(request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return problem(413, f"the body is larger than {_served(request).limits.body_bytes} bytes")
        return await endpoint(request, body)

    return call


@_with_body
async def _generate(request: Request, body: bytes) -> Response:
    served = _served(request)
    if served.draining:
        return problem(503, "the server is shutting down", Retry_After=str(RETRY_AFTER_S))
    asked, several = await asyncio.to_thread(parse_generate, body, served.model, served.fresh)
    if served.batcher.waiting + len(asked) > served.limits.waiting + served.batcher.free_slots:
        return problem(503, f"{served.batcher.waiting} requests wait; try again", Retry_After=str(RETRY_AFTER_S))
    tickets = [Ticket(one.rid, one.job) for one in asked]
    served.batcher.submit(tickets)
    done = asyncio.gather(*(asyncio.wrap_future(ticket.future) for ticket in tickets))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([done, gone], return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            served.batcher.abort({ticket.rid for ticket in tickets}.__contains__)
        await done
    finally:
        gone.cancel()
    replies = [_reply(served, one) for one in asked]
    return JSONResponse(replies if several else replies[0])


async def _disconnected(request: Request) -> None:
    """Return when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _reply(served: Served, asked: Asked) -> dict[str, Any]:
    ids = asked.job.ids
    text = served.decode(ids[:-1] if asked.job.finish == "stop" else ids)
    return reply(asked, text, served.labels.__getitem__, len(served.labels) - 1)


async def _ready(request: Request) -> Response:
    served = _served(request)
    if served.draining or not served.batcher.alive:
        return problem(503, "the server is shutting down" if served.batcher.alive else "the engine has stopped")
    return Response(status_code=200)


async def _model_info(request: Request) -> Response:
    served = _served(request)
    return JSONResponse({**served.info, "weight_version": served.weight_version})


async def _server_info(request: Request) -> Response:
    served, batcher = _served(request), _served(request).batcher
    state: dict[str, Any] = {"running": batcher.running, "waiting": batcher.waiting}
    state |= {"paused": batcher.paused, "released": batcher.released}
    return JSONResponse({**served.settings, "weight_version": served.weight_version, "internal_states": [state]})


async def _metrics(request: Request) -> Response:
    """Prometheus text with SGLang's names where it has one."""
    batcher = _served(request).batcher
    counts = batcher.counts
    hits = counts.cached_tokens / max(1, counts.prompt_tokens)
    rows: list[tuple[str, str, float]] = [
        ("sglang:num_running_reqs", "gauge", batcher.running),
        ("sglang:num_queue_reqs", "gauge", batcher.waiting),
        ("sglang:gen_throughput", "gauge", counts.tokens_per_s if batcher.running else 0.0),
        ("sglang:cache_hit_rate", "gauge", hits),
        ("sglang:prompt_tokens_total", "counter", counts.prompt_tokens),
        ("sglang:cached_tokens_total", "counter", counts.cached_tokens),
        ("sglang:generation_tokens_total", "counter", counts.sampled_tokens),
        ("sglang:num_requests_total", "counter", counts.finished.total()),
        ("sglang:num_aborted_requests_total", "counter", counts.finished["abort"]),
        ("sglang:num_retracted_requests_total", "counter", counts.retracted),
    ]
    lines = [f"# TYPE {name} {kind}\n{name} {value}" for name, kind, value in rows]
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


@_with_body
async def _update(request: Request, body: bytes) -> Response:
    served, asked = _served(request), parse(UpdateBody, body)
    async with served.updating:
        try:
            weights = await asyncio.to_thread(served.read, asked.model_path)
            if asked.abort_all_requests:
                served.batcher.abort(lambda rid: True)
            await _wait(served.batcher.call(lambda: _install(served, weights, asked), when_idle=True))
        except (Empo2Error, MemoryError, RuntimeError) as error:
            line = in_one_line(error)
            if line is None or not served.batcher.alive:
                raise
            kept = (
                "the old ones are served" if served.holds_weights else "and the old ones were given back: none is there"
            )
            message = f"weights not updated, {kept}: {line}"
            return JSONResponse({"success": False, "message": message, "error": {"message": message}}, 400)
    message = f"serving {asked.model_path} as version {served.weight_version}"
    return JSONResponse({"success": True, "message": message, "num_paused_requests": served.batcher.running})


def _install(served: Served, weights: Any, asked: UpdateBody) -> None:
    """Change weights and label together; runs in the engine's thread."""
    if asked.flush_cache and served.batcher.running:
        raise EngineError(
            f"{served.batcher.running} requests are paused in place and keep their cache: flush_cache = false or "
            "another pause is needed"
        )
    label = served.weight_version if asked.weight_version is None else asked.weight_version
    served.install(weights, len(served.labels))
    served.labels.append(label)
    served.weight_version = label
    served.holds_weights = True


@_with_body
async def _update_version(request: Request, body: bytes) -> Response:
    served, asked = _served(request), parse(VersionBody, body)

    def rename() -> None:
        served.labels[-1] = served.weight_version = asked.new_version

    if asked.abort_all_requests:
        served.batcher.abort(lambda rid: True)
    await _wait(served.batcher.call(rename))
    return JSONResponse({"success": True, "message": "weight version updated", "new_version": asked.new_version})


@_with_body
async def _check_weights(request: Request, body: bytes) -> Response:
    parse(CheckerBody, body)
    sums = dict(await asyncio.to_thread(_served(request).checksums))
    whole = hashlib.sha256("".join(f"{name}{sums[name]}" for name in sorted(sums)).encode()).hexdigest()
    ranks = [{"checksums": sums, "per_gpu_checksum": whole}]
    return JSONResponse({"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": whole})


@_with_body
async def _release_memory(request: Request, body: bytes) -> Response:
    served, parts = _served(request), parse(MemoryBody, body).tags or MEMORY_PARTS
    await _wait(served.batcher.release_memory(parts))
    served.holds_weights &= "weights" not in parts
    return JSONResponse(None)


@_with_body
async def _resume_memory(request: Request, body: bytes) -> Response:
    await _wait(_served(request).batcher.resume_memory(parse(MemoryBody, body).tags or MEMORY_PARTS))
    return JSONResponse(None)


async def _flush(request: Request) -> Response:
    await _wait(_served(request).batcher.flush())
    return PlainTextResponse("Cache flushed.\n")


@_with_body
async def _pause(request: Request, body: bytes) -> Response:
    await _wait(_served(request).batcher.pause(parse(PauseBody, body).mode))
    return JSONResponse({"status": "ok", "message": "generation paused"})


@_with_body
async def _continue(request: Request, body: bytes) -> Response:
    parse(EmptyBody, body)
    await _wait(_served(request).batcher.resume())
    return JSONResponse({"status": "ok", "message": "generation continues"})


@_with_body
async def _abort(request: Request, body: bytes) -> Response:
    asked = parse(AbortBody, body)
    if asked.rid is None and not asked.abort_all:
        raise EngineError("abort_request: rid or abort_all is needed")
    rid = asked.rid or ""
    _served(request).batcher.abort(lambda other: asked.abort_all or other == rid or _is_part(other, rid))
    return Response(status_code=200)


def _is_part(rid: str, batch: str) -> bool:
    """Whether a request is one of a batch that was named `batch`."""
    return rid.startswith(f"{batch}_") and rid.removeprefix(f"{batch}_").isdecimal()


async def _wait(future: "Future[Any]") -> Any:
    return await asyncio.wrap_future(future)
