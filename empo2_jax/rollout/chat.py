"""Messages to token ids, once: sampled ids are kept as they are and never pass through text again.

A transcript is append-only: the next prompt is everything so far plus the ids of one new user turn. The glue between
turns comes from the model's own chat template, found by rendering it once around markers.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from empo2_jax.errors import DataError
from empo2_jax.types import Message

TokenIds = Int32[np.ndarray, " _"]  # any length; a name would tie the lengths of all arguments
_USER, _ANSWER = "qzuserzq", "qzanswerzq"


@runtime_checkable
class ChatTokenizer(Protocol):
    """What the chat needs of a tokenizer; `models.tokenizer.Tokenizer` has it. Its `str` says which one, in errors."""

    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written in it become their ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        ...

    def chat_text(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The chat template's rendering."""
        ...


class Chat:
    """Renders the turns of one kind of conversation: a tokenizer with its template and a system prompt."""

    def __init__(self, tokenizer: ChatTokenizer, system_prompt: str = ""):
        self.tokenizer = tokenizer
        system = [Message("system", system_prompt)] if system_prompt else []
        user, answer = Message("user", _USER), Message("assistant", _ANSWER)
        first = tokenizer.chat_text([*system, user], True)
        whole = tokenizer.chat_text([*system, user, answer, user], True)
        closed = tokenizer.chat_text([*system, user, answer], False)
        kept = whole.startswith(first + _ANSWER) and closed.startswith(first + _ANSWER)
        if first.count(_USER) != 1 or whole.count(_USER) != 2 or whole.count(_ANSWER) != 1 or not kept:
            raise DataError(
                f"{tokenizer}: chat template: a user turn must appear once and earlier turns must not change"
            )
        self._open = tuple(first.split(_USER))
        self._next = tuple(whole.removeprefix(first + _ANSWER).split(_USER))
        self._close = closed.removeprefix(first + _ANSWER)
        close_ids = tokenizer.encode(self._close)
        if not close_ids:
            raise DataError(f"{tokenizer}: chat template: an assistant turn must be closed by a token")
        self.close_id = close_ids[0]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the template's closing token and the tokenizer's stop tokens."""
        return tuple(dict.fromkeys([self.close_id, *self.tokenizer.stop_ids]))

    def opening(self, user: str) -> TokenIds:
        """Prompt ids of a conversation's first user turn, generation header included."""
        return self._ids(self._open, user)

    def following(self, action_ids: Sequence[int] | TokenIds, user: str) -> TokenIds:
        """Ids between an answer and the next one: closing token (unless it was sampled), user turn, header."""
        ids = self._ids(self._next, user)
        closed = len(action_ids) > 0 and int(action_ids[-1]) == self.close_id
        return ids[1:] if closed else ids

    def answer(self, text: str) -> TokenIds:
        """Ids of an answer that somebody wrote, closing token included (supervised training only)."""
        return np.asarray([*self.tokenizer.encode(_inert(text)), self.close_id], np.int32)

    def text(self, action_ids: Sequence[int] | TokenIds) -> str:
        """Readable text of sampled ids."""
        return self.tokenizer.decode([int(token) for token in action_ids])

    def _ids(self, template: tuple[str, ...], user: str) -> TokenIds:
        return np.asarray(self.tokenizer.encode(_inert(user).join(template)), np.int32)


def _inert(text: str) -> str:
    """Text from the world must not open or close turns: `<|…|>` is taken apart."""
    return text.replace("<|", "< |")
