"""Every error a user can meet; the tree is the documentation.

Empo2Error
├── ConfigError       a key, a value or a combination of values that cannot work
├── DataError         a weights file, tokenizer, catalogue or recorded run that cannot be read
├── EnvError          the environment failed: no Java, a dead simulator, an unknown task
├── EngineError       the rollout engine failed or refused a request
├── SyncError         published weights that are missing, damaged, of another model, or cannot be written
├── UpdateError       the training diverged: no update has a finite loss and gradient any more
├── GangError         a process of the run did not come, failed or is gone
└── CheckpointError   a checkpoint is missing, corrupt or belongs to another run

The message says what, where, and what is allowed. `empo2` prints it on one line and exits with 2, and so it does where
the system or its memory is at its end (`in_one_line`). What pydantic finds is put into these words by `wrong_value`.
"""

import errno
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

GUIDE = "see docs/troubleshooting.md#"  # a section of it
_PACKAGE = Path(__file__).parent
_ALLOWED = {  # by pydantic's name of the problem; other problems keep pydantic's words
    "int_type": "a whole number is allowed",
    "float_type": "a number is allowed",
    "finite_number": "a finite number is allowed",
    "bool_type": "true or false is allowed",
    "string_type": "text is allowed",
    "string_unicode": "text in UTF-8 is allowed",
    "string_too_short": "text of at least {min_length} characters is allowed",
    "tuple_type": "a list is allowed",
    "list_type": "a list is allowed",
    "dict_type": "a table of keys and values is allowed",
    "model_type": "a table of keys and values is allowed",
    "greater_than_equal": "at least {ge} is allowed",
    "greater_than": "more than {gt} is allowed",
    "less_than_equal": "at most {le} is allowed",
    "less_than": "less than {lt} is allowed",
    "literal_error": "{expected} is allowed",
    "enum": "{expected} is allowed",
    "none_required": "nothing is allowed",
    "too_short": "a length of at least {min_length} is allowed",
    "too_long": "a length of at most {max_length} is allowed",
}


def wrong_value(problem: "ErrorDetails") -> str:
    """One problem of a `ValidationError` as `key = value: what is allowed`, `key is missing` or `unknown key`.

    A check of a whole table names its keys itself: its words stand alone.
    """
    kind, value = problem["type"], problem["input"]
    *parents, last = problem["loc"] or ("",)
    if kind == "missing" and isinstance(last, int):  # of a list with a fixed number of values
        return f"{_path(parents)} = {short(value)}: more than {last} values are needed"
    key = _path([*parents, last])
    if kind == "missing":
        return f"{key} is missing"
    if kind == "extra_forbidden":
        return f"unknown key `{key}`"
    said = problem["msg"].removeprefix("Value error, ")
    allowed = _ALLOWED[kind].format(**problem.get("ctx", {})) if kind in _ALLOWED else said
    if kind == "value_error" and (isinstance(value, dict) or not key):
        return allowed
    return f"{key or 'the record'} = {short(value)}: {allowed}"


def _path(parts: Sequence[int | str]) -> str:
    """`section.key[place]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def short(value: Any) -> str:
    """At most 60 characters of a value, for messages."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Empo2Error(Exception):
    """Base of all errors that are a user's or the world's fault, never a bug in this package."""


class ConfigError(Empo2Error):
    """A configuration that cannot work."""


class DataError(Empo2Error):
    """A file that cannot be read as what it should be."""


class EnvError(Empo2Error):
    """The environment failed."""


class EngineError(Empo2Error):
    """The rollout engine failed."""


class SyncError(Empo2Error):
    """Weights that cannot be published or must not be loaded."""


class UpdateError(Empo2Error):
    """The optimizer has nothing finite to apply."""


class CheckpointError(Empo2Error):
    """A checkpoint cannot be written or restored."""


class GangError(Empo2Error):
    """Another process of the run is missing or failed."""


def in_one_line(error: Empo2Error | OSError | MemoryError | RuntimeError) -> str | None:
    """What to tell the user; None is a bug, whose traceback is needed.

    JAX's runtime errors are `RuntimeError`s here: what concerns memory is known by its text alone.
    """
    if isinstance(error, Empo2Error):
        return " ".join(str(error).split())
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return _out_of_memory("the host", error)
    if isinstance(error, OSError):
        said = " ".join((error.strerror or str(error)).split()) or type(error).__name__
        return f"{error.filename}: {said}" if error.filename else said
    return _out_of_memory("the device", error) if _is_about_memory(error) else None


def _is_about_memory(error: RuntimeError) -> bool:
    """Whether a device had no room; RESOURCE_EXHAUSTED alone may also be a limit of gRPC on its messages."""
    text = str(error).upper()
    exhausted = "RESOURCE_EXHAUSTED" in text and ("MEMORY" in text or "ALLOCAT" in text)
    return not isinstance(error, RecursionError) and (exhausted or "OUT OF MEMORY" in text.replace("_", " "))


def _out_of_memory(place: str, error: Exception) -> str:
    """Where it happened is the innermost line of this package; of what was said, the first line with words."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _PACKAGE in Path(frame.filename).parents]
    where = f" in {Path(frames[-1].filename).relative_to(_PACKAGE)} ({frames[-1].name})" if frames else ""
    words = str(error).strip()
    said = f": {words.splitlines()[0].rstrip('. ')}" if words else ""
    return f"{place} is out of memory{where}{said}; `empo2 plan` says what takes how much, {GUIDE}out-of-memory"
