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
from empo2_jax.models.hf_config import Keys, Stops, TokenizerConfig
from empo2_jax.readers import read_json, read_text
from empo2_jax.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TEMPLATE = "chat_template.jinja"
_TURN_ENDS = ("<|im_end|>", "<|endoftext|>")


class Tokenizer:
    """A folder's tokenizer with its chat template and stop ids."""

    def __init__(
        self, folder: Path, backend: "PreTrainedTokenizerFast", template: str | None, stop_ids: tuple[int, ...]
    ):
        self._folder, self._backend, self._template = folder, backend, template
        self.stop_ids = stop_ids  # ids that end an assistant turn, the most specific first
        self.size = max(backend.get_vocab().values()) + 1  # ids are below this

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json` and what else the folder has.

        Raises:
            DataError: a file is missing or unreadable, the chat template fails, or no stop token can be found.
        """
        from transformers import PreTrainedTokenizerFast  # slow to import, and only needed here

        folder = Path(folder)
        read_json(folder / "tokenizer.json", dict[str, Any])
        settings = _optional(folder / "tokenizer_config.json", TokenizerConfig)
        specials = settings.model_dump(exclude={"chat_template"}, exclude_none=True)
        try:
            backend = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **specials)
        except Exception as error:  # the parser raises nothing narrower
            raise DataError(f"{folder / 'tokenizer.json'}: not a tokenizer: {error}") from error
        if not backend.get_vocab():
            raise DataError(f"{folder / 'tokenizer.json'}: a tokenizer without tokens")
        stop_ids = _stop_ids(folder, backend)
        if not stop_ids:
            raise DataError(f"{folder}: no stop token; expected eos_token_id in generation_config.json or config.json")
        template = read_text(folder / _TEMPLATE) if (folder / _TEMPLATE).exists() else settings.chat_template
        made = cls(folder, backend, template, stop_ids)
        if template is not None:
            made.chat_text([Message("user", "hello")], True)
        return made

    def __str__(self) -> str:
        """The folder, for messages."""
        return str(self._folder)

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
            raise DataError(f"{self._folder}: no chat template ({_TEMPLATE} or in tokenizer_config.json)")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._backend.apply_chat_template(
                turns, chat_template=self._template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise DataError(f"{self._folder}: chat template: {type(error).__name__}: {error}") from error
        assert isinstance(text, str)  # because of tokenize=False
        return text

    def check_fits(self, vocab_size: int, folder: Path) -> None:
        """Raise DataError, naming the folder, when a token has no row in an embedding of `vocab_size` rows."""
        if self.size > vocab_size:
            raise DataError(
                f"{folder}: the tokenizer has ids up to {self.size - 1}, the model's vocab_size is {vocab_size}"
            )


def _optional(path: Path, shape: type[Keys]) -> Any:
    """What a file says; one that is not there says nothing."""
    return read_json(path, shape) if path.exists() else shape()


def _stop_ids(folder: Path, backend: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    vocab = backend.get_vocab()
    found: list[int | None] = []
    for name in ("generation_config.json", "config.json"):
        found += _optional(folder / name, Stops).eos_token_id
    found += [backend.eos_token_id, *(vocab.get(token) for token in _TURN_ENDS)]
    return tuple(dict.fromkeys(token for token in found if token is not None))
