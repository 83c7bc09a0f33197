"""What a SGLang server answers, checked before it is believed; and what its failures are called.

What can go wrong has three kinds, because three things are done about it: the request or a key is refused (`Refused`,
asking again is pointless), the server is at fault (`ServerFault`, ask another one) or only busy (`Busy`, ask again
later). Pure functions of an answer; the calls are in `sglang_client`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Float32, Int32

from empo2_jax.errors import EngineError
from empo2_jax.rollout.base import Completion
from empo2_jax.rollout.chat import TokenIds

ABOVE_ZERO = 1e-4  # nats by which rounding may lift a log-prob over 0


class Refused(EngineError):
    """The server will not do this however often it is asked; `status` is HTTP's, 200 for a no in the answer."""

    def __init__(self, message: str, status: int = 200):
        super().__init__(message)
        self.status = status


class Denied(EngineError):
    """A key is wrong or missing."""


class ServerFault(EngineError):
    """The server did not do what it should; another one may."""


class Lost(ServerFault):
    """The connection could not be made, broke or stayed silent: the server may be dead."""


class Stale(ServerFault):
    """The server answered from other weights than it should have."""


class Busy(EngineError):
    """The server is healthy and gave nothing usable now; `wait_s` is how long it asked to be left alone, seconds."""

    def __init__(self, message: str, wait_s: float = 0.0):
        super().__init__(message)
        self.wait_s = wait_s


class Unspeakable(Busy):
    """An id without a text was sampled; another draw will do."""


@dataclass(frozen=True)
class Span:
    """Output tokens start ≤ i < end were sampled under one weight version."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class Reply:
    """A checked completion; versions are the server's labels."""

    ids: Int32[np.ndarray, " A"]
    logprobs: Float32[np.ndarray, " A"]
    stopped: bool
    cached_tokens: int
    spans: tuple[Span, ...]


def parse_object(where: str, text: str) -> dict[str, Any]:
    """A JSON object; `where` names the call in the `ServerFault` that anything else is."""
    try:
        content = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        _garbage(where, f"no JSON but {text[:60]!r}")
    if not isinstance(content, dict):
        _garbage(where, f"a JSON {type(content).__name__}, no object")
    return content


def parse_completion(where: str, reply: dict[str, Any], max_tokens: int, vocab_size: int) -> Reply:
    """A completion whose ids, log-probs and versions agree with each other.

    Raises:
        ServerFault: they do not.
        Busy: someone aborted the request.
        Unspeakable: an id without a text was sampled.
    """
    meta = _meta(where, reply)
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict) or reason.get("type") not in ("stop", "length", "abort"):
        _garbage(where, f"finish_reason {reason!r}")
    if reason["type"] == "abort":
        raise Busy(f"{where}: the request was aborted: {str(reason.get('message') or 'no reason given')[:200]}")
    ids, pairs = reply.get("output_ids"), _pairs(where, meta, "output_token_logprobs")
    if not isinstance(ids, list) or not 1 <= len(ids) <= max_tokens:
        _garbage(where, f"{len(ids) if isinstance(ids, list) else 'no'} output_ids; 1 to {max_tokens} were asked for")
    if len(pairs) != len(ids):
        _garbage(where, f"{len(ids)} tokens with {len(pairs)} log-probs")
    if [token for _, token in pairs] != ids or not all(isinstance(token, int) and token >= 0 for token in ids):
        _garbage(where, "log-probs of other tokens than output_ids")
    if max(ids) >= vocab_size:
        raise Unspeakable(f"{where}: sampled id {max(ids)}, which has no text; 0 to {vocab_size - 1} are allowed")
    return Reply(
        ids=np.asarray(ids, np.int32),
        logprobs=_logprobs(where, [value for value, _ in pairs]),
        stopped=reason["type"] == "stop",
        cached_tokens=int(meta.get("cached_tokens") or 0),
        spans=_spans(where, meta, len(ids)),
    )


def accept(where: str, reply: Reply, versions: Mapping[str, int]) -> Completion:
    """A completion under version numbers; `versions` has those that it may be sampled by, by their label.

    Raises:
        Stale: it was sampled by other weights.
    """
    labels = {span.label for span in reply.spans}
    if strange := labels - versions.keys():
        raise Stale(f"{where}: sampled with weights {min(strange)!r}, not {list(versions)[-1]!r}")
    spans = tuple((versions[span.label], span.start, span.end) for span in reply.spans)
    return Completion(
        ids=reply.ids,
        logprobs=reply.logprobs,
        stopped=reply.stopped,
        cached_tokens=reply.cached_tokens,
        policy_version=spans[-1][0],
        version_spans=spans,
    )


def parse_score(where: str, reply: dict[str, Any], ids: TokenIds) -> tuple[Float32[np.ndarray, " scored"], str]:
    """Log-probs of all of `ids` but the first, nats, and the label of the weights that gave them."""
    meta = _meta(where, reply)
    scored = _pairs(where, meta, "input_token_logprobs")
    if [token for _, token in scored] != ids.tolist():
        _garbage(where, f"log-probs of {len(scored)} tokens, which are not the {len(ids)} sent")
    return _logprobs(where, [value for value, _ in scored[1:]]), _label(where, meta)


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text to sums by metric name; buckets, comments and lines that are no sample are left out."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        value = rest.rpartition("}")[2].split()[:1]
        if line.startswith("#") or name.endswith(("_bucket", "_created")) or not value:
            continue
        try:
            number = float(value[0])
        except ValueError:
            continue
        if math.isfinite(number):
            totals[name] = totals.get(name, 0.0) + number
    return totals


def error_text(text: str) -> str:
    """Message of an error, which comes under `error`, `message` or `detail`, as an object, a text or no JSON at all."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return " ".join(text.split())[:200] or "no message"
    error: Any = content
    for key in ("error", "message", "detail"):
        error = error.get(key, error) if isinstance(error, dict) else error
    return " ".join(str(error).split())[:300]


def _garbage(where: str, what: str) -> NoReturn:
    raise ServerFault(f"{where}: not an answer of SGLang: {what}")


def _meta(where: str, reply: dict[str, Any]) -> dict[str, Any]:
    meta = reply.get("meta_info")
    if not isinstance(meta, dict):
        _garbage(where, "no meta_info")
    return meta


def _label(where: str, meta: dict[str, Any]) -> str:
    label = meta.get("weight_version")
    if label is None:
        _garbage(where, "no weight_version")
    return str(label)


def _pairs(where: str, meta: dict[str, Any], key: str) -> list[tuple[Any, Any]]:
    entries = meta.get(key)
    if not isinstance(entries, list) or not all(isinstance(item, list) and len(item) >= 2 for item in entries):
        _garbage(where, f"no list {key}")
    return [(item[0], item[1]) for item in entries]


def _logprobs(where: str, values: Sequence[Any]) -> Float32[np.ndarray, " A"]:
    numbers = [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    if len(numbers) < len(values) or max(numbers, default=0.0) > ABOVE_ZERO:
        _garbage(where, "a log-prob is missing, not finite or above 0")
    return np.minimum(np.asarray(numbers, np.float32), np.float32(0))


def _spans(where: str, meta: dict[str, Any], count: int) -> tuple[Span, ...]:
    label, entries = _label(where, meta), meta.get("weight_versions")
    if not entries:
        return (Span(label, 0, count),)
    try:
        spans = tuple(Span(str(item["version"]), int(item["start"]), int(item["end"])) for item in entries)
    except (TypeError, KeyError, ValueError):
        _garbage(where, f"weight_versions {str(entries)[:100]}")
    if [span.start for span in spans] != [0, *(span.end for span in spans[:-1])] or spans[-1].end != count:
        _garbage(where, f"weight_versions {str(entries)[:100]} do not cover {count} tokens")
    return spans
