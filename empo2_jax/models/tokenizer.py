"""The one place that turns text into ids and back.

The tokenizer is always built from the folder's `tokenizer.json` itself: transformers' `AutoTokenizer` picks a class by
model type and may replace the file's pre-tokenizer by that class's own, which changes the ids of most texts.
No special token is ever added around a text; those written in it (chat templates write them) are recognized.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from empo2_jax.errors import DataError
from empo2_jax.models.hf_folder import read_json
from empo2_jax.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")
_TURN_ENDS = ("<|im_end|>", "<|endoftext|>")


class Tokenizer:
    """A folder's tokenizer with its chat template and stop ids."""

    def __init__(self, backend: "PreTrainedTokenizerFast", template: str | None, stop_ids: tuple[int, ...]):
        self._backend = backend
        self._template = template
        self.stop_ids = stop_ids  # ids that end an assistant turn, the most specific first
        self.size = max(backend.get_vocab().values()) + 1  # ids are below this

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json` and what else the folder has.

        Raises:
            DataError: the file is missing or unreadable, or no stop token can be found.
        """
        from transformers import PreTrainedTokenizerFast  # slow to import, and only needed here

        folder = Path(folder)
        read_json(folder / "tokenizer.json")
        settings = _optional(folder / "tokenizer_config.json")
        specials = {name: _text(settings[name]) for name in _SPECIALS if settings.get(name) is not None}
        try:
            backend = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **specials)
        except Exception as error:  # the parser raises nothing narrower
            raise DataError(f"{folder / 'tokenizer.json'}: not a tokenizer: {error}") from error
        if not backend.get_vocab():
            raise DataError(f"{folder / 'tokenizer.json'}: a tokenizer without tokens")
        stop_ids = _stop_ids(folder, backend)
        if not stop_ids:
            raise DataError(f"{folder}: no stop token; expected eos_token_id in generation_config.json or config.json")
        return cls(backend, _template(folder, settings), stop_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without added special tokens."""
        return self._backend.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self._backend.backend_tokenizer.decode(list(ids), skip_special_tokens=True)

    def chat_text(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Messages as the model saw them in training, by the folder's own template.

        Raises:
            DataError: the folder has no chat template, or one that fails or tries what its sandbox forbids.
        """
        if self._template is None:
            raise DataError("the tokenizer has no chat template (chat_template.jinja or tokenizer_config.json)")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._backend.apply_chat_template(
                turns, chat_template=self._template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"chat template: {type(error).__name__}: {error}") from error
        assert isinstance(text, str)  # because of tokenize=False
        return text

    def check_fits(self, vocab_size: int, folder: Path) -> None:
        """Raise DataError, naming the folder, when a token has no row in an embedding of `vocab_size` rows."""
        if self.size > vocab_size:
            raise DataError(
                f"{folder}: the tokenizer has ids up to {self.size - 1}, the model's vocab_size is {vocab_size}"
            )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Template file first, then the settings, where it is a string or a list of named ones."""
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _stop_ids(folder: Path, backend: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    vocab = backend.get_vocab()
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        ids = _optional(folder / name).get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids]
    found += [backend.eos_token_id, *(vocab.get(token) for token in _TURN_ENDS)]
    return tuple(dict.fromkeys(token for token in found if token is not None))
