"""SGLang's native `/generate` as data: a JSON body to jobs, finished jobs to a JSON reply.

Spoken are the fields that a trainer needs (`GenerateBody`, `SamplingParams`). As in SGLang, unknown sampling keys are
an error and unknown fields of the body are ignored; known ones that change what is computed and are not spoken here
(`stream`, `lora_path`, …) are an error, never silence. A log-probability is that of log-softmax(logits / temperature)
over the full vocabulary, that of a prompt token at temperature 1, and greedy sampling reports temperature 1.

Sampling is a function of (key, position). `sampling_params.sampling_seed` gives the key
`randomness.words(sampling_seed, "serve")`; the field `sampling_key`, ours alone, gives its two 32-bit words directly,
so that a server answers exactly as the engine inside a trainer; without either every request gets a key of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from jaxtyping import UInt32
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from empo2_jax.errors import EngineError
from empo2_jax.randomness import words
from empo2_jax.rollout.base import Request, Sampling
from empo2_jax.rollout.stepwise import MAX_STOP_IDS, Job

GREEDY_BELOW = 1e-6  # temperatures under it are greedy, as in SGLang

Word = Annotated[int, Field(ge=0, lt=1 << 32)]
Ids = list[int]
Neutral = Literal[0] | None
Parsed = TypeVar("Parsed", bound=BaseModel)


class SamplingParams(BaseModel):
    """How to sample one request; the keys after `sampling_seed` are taken at the value that changes nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    max_new_tokens: Annotated[int, Field(ge=0)] = 128
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Literal[-1] = -1
    stop_token_ids: Ids | None = None
    ignore_eos: bool = False  # also ignores stop_token_ids, as in SGLang
    sampling_seed: int | None = None
    n: Literal[1] = 1
    stop: Annotated[list[str], Field(max_length=0)] | None = None
    min_p: Neutral = None
    min_new_tokens: Neutral = None
    frequency_penalty: Neutral = None
    presence_penalty: Neutral = None
    repetition_penalty: Literal[1] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: Literal[False] | None = None


class GenerateBody(BaseModel):
    """One request, or several: then every field may be a list with one value for each."""

    model_config = ConfigDict(strict=True)

    input_ids: Ids | list[Ids]
    sampling_params: SamplingParams | list[SamplingParams] = Field(default_factory=SamplingParams)
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] | None = -1
    sampling_key: tuple[Word, Word] | list[tuple[Word, Word]] | None = None
    stream: Literal[False] = False
    top_logprobs_num: Neutral = None
    token_ids_logprob: None = None
    lora_path: None = None
    return_hidden_states: Literal[False] = False


@dataclass(frozen=True)
class Model:
    """What of the served model decides which requests can be served."""

    vocab_size: int  # rows of the embedding: allowed input ids
    token_count: int  # ids at and above it are never sampled: no token has them
    max_length: int  # prompt + new tokens
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """A job with its name; the reply lists log-probabilities if they were asked for."""

    rid: str
    job: Job
    return_logprob: bool


def parse_generate(body: bytes, model: Model, fresh: Callable[[], tuple[str, Any]]) -> tuple[list[Asked], bool]:
    """Jobs of a request body, and whether the reply is a list.

    Args:
        body: JSON.
        model: What is served.
        fresh: Gives a new rid and a new key (two 32-bit words) to a request that names none.

    Raises:
        EngineError: what is wrong in one line: field, value and what is allowed.
    """
    parsed = parse(GenerateBody, body)
    if not parsed.input_ids:
        raise EngineError("input_ids: empty; at least one token is needed")
    several = isinstance(parsed.input_ids[0], list)
    prompts = parsed.input_ids if several else [parsed.input_ids]
    count = len(prompts)
    rids = parsed.rid
    if several and isinstance(rids, str):
        rids = [f"{rids}_{index}" for index in range(count)]
    fields = zip(
        prompts,
        _each("sampling_params", parsed.sampling_params, count, several),
        _each("rid", rids, count, several),
        _each("return_logprob", parsed.return_logprob, count, several),
        _each("logprob_start_len", parsed.logprob_start_len, count, several),
        _each("sampling_key", parsed.sampling_key, count, several),
        strict=True,
    )
    return [_asked(*values, model, fresh) for values in fields], several


def reply(asked: Asked, text: str, version: Callable[[int], str], current: int) -> dict[str, Any]:
    """The JSON of a finished job.

    Args:
        asked: The job with its name.
        text: Its sampled ids as text.
        version: Names a policy version of the engine.
        current: The engine's version, for a job without sampled ids.
    """
    job = asked.job
    starts = [start for _, start in job.spans] + [len(job.ids)]
    spans = zip(job.spans, starts[1:], strict=True)
    last = job.spans[-1][0] if job.spans else current
    meta = {
        "id": asked.rid,
        "finish_reason": _finish_reason(job),
        "prompt_tokens": len(job.request.prompt_ids),
        "completion_tokens": len(job.ids),
        "cached_tokens": job.cached_tokens,
        "weight_version": version(last),
        "weight_versions": [
            {"version": version(number), "start": start, "end": end} for (number, start), end in spans if end > start
        ],
    }
    if asked.return_logprob:
        meta["output_token_logprobs"] = [[*pair, None] for pair in zip(job.logprobs, job.ids, strict=True)]
        meta["input_token_logprobs"] = []
        if job.score_from is not None and job.prompt_logprobs is not None:
            scored = [None, *job.prompt_logprobs]
            ids = job.request.prompt_ids[job.score_from :].tolist()
            meta["input_token_logprobs"] = [[*pair, None] for pair in zip(scored, ids, strict=True)]
    return {"text": text, "output_ids": job.ids, "meta_info": meta}


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """Read a JSON body; an empty one is {}.

    Raises:
        EngineError: the first thing that is wrong, in one line.
    """
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    problem = next((entry for entry in problems if entry["type"] == "extra_forbidden"), problems[0])
    # Where a value may have several types, pydantic puts their names into the path: keys and indices are what is told.
    path = [str(part) for part in problem["loc"] if str(part) not in _PLAIN_TYPES and "[" not in str(part)]
    said = "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"]
    raise EngineError(f"{'.'.join(path) or 'body'}: {said[0].lower()}{said[1:]}")


_PLAIN_TYPES = ("str", "int", "bool", "SamplingParams")


def _each(name: str, value: Any, count: int, several: bool) -> list[Any]:
    """One value for each request."""
    if not isinstance(value, list):
        return [value] * count
    if not several or len(value) != count:
        raise EngineError(f"{name}: a list of {len(value)} for {count} requests; one value for each is allowed")
    return value


def _asked(
    prompt: Ids,
    params: SamplingParams,
    rid: str | None,
    return_logprob: bool,
    start: int | None,
    key: tuple[int, int] | None,
    model: Model,
    fresh: Callable[[], tuple[str, Any]],
) -> Asked:
    own_rid, own_key = fresh()
    _check_ids("input_ids", prompt, model)
    _check_ids("sampling_params.stop_token_ids", params.stop_token_ids or [], model)
    if not prompt:
        raise EngineError("input_ids: empty; at least one token is needed")
    if len(prompt) + params.max_new_tokens > model.max_length:
        raise EngineError(
            f"{len(prompt)} prompt tokens + max_new_tokens {params.max_new_tokens} exceed the context of "
            f"{model.max_length} tokens"
        )
    if start is not None and not -1 <= start < len(prompt):
        raise EngineError(f"logprob_start_len {start}: -1 to {len(prompt) - 1} are allowed for this prompt")
    stops = () if params.ignore_eos else tuple(dict.fromkeys([*(params.stop_token_ids or []), *model.stop_ids]))
    if len(stops) > MAX_STOP_IDS:
        raise EngineError(
            f"sampling_params.stop_token_ids: {len(stops)} with the model's own; at most {MAX_STOP_IDS} are allowed"
        )
    sampling = Sampling(
        max_tokens=params.max_new_tokens,
        temperature=params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
        stop_ids=stops,
        top_p=params.top_p,
        banned_from=model.token_count,
    )
    request = Request("", np.asarray(prompt, np.int32), _key(params, key, own_key), sampling)
    score_from = start if return_logprob and start is not None and start >= 0 else None
    return Asked(rid or own_rid, Job(request, score_from), return_logprob)


def _key(params: SamplingParams, key: tuple[int, int] | None, own: Any) -> UInt32[np.ndarray, "2"]:
    if key is not None:
        return np.asarray(key, np.uint32)
    return words(params.sampling_seed, "serve") if params.sampling_seed is not None else own


def _check_ids(name: str, ids: Sequence[int], model: Model) -> None:
    if ids and (min(ids) < 0 or max(ids) >= model.vocab_size):
        raise EngineError(f"{name}: ids {min(ids)} to {max(ids)}; 0 to {model.vocab_size - 1} are allowed")


def _finish_reason(job: Job) -> dict[str, Any]:
    if job.finish == "stop":
        return {"type": "stop", "matched": job.ids[-1]}
    if job.finish == "abort":
        return {"type": "abort", "message": "aborted", "status_code": None, "err_type": None}
    return {"type": "length", "length": job.request.sampling.max_tokens}
