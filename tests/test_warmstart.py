"""Supervised rows: the loss falls on answers and their closing tokens and on nothing else."""

import numpy as np
import pytest

from empo2_jax.envs import toy
from empo2_jax.types import Message
from empo2_jax.warmstart import answer_row
from tests.fixtures.worlds import word_chat, word_tokenizer

CHAT = [
    Message("user", "it is dark ."),
    Message("assistant", "look in the vase"),
    Message("user", "the vase is empty ."),
    Message("assistant", "the bulb is not in the vase ."),
]


def test_mask_lies_on_the_answers_and_their_closing_tokens():
    row = answer_row(word_chat(), CHAT)
    answers = [word_chat().answer(message.content).tolist() for message in CHAT[1::2]]
    starts = np.flatnonzero(np.diff(row.loss_mask.astype(int), prepend=0) == 1)
    ends = np.flatnonzero(np.diff(row.loss_mask.astype(int), append=0) == -1) + 1
    found = [row.token_ids[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
    assert found == answers
    assert all(answer[-1] == word_chat().close_id for answer in found)
    assert row.token_weight.tolist() == row.loss_mask.astype(float).tolist()
    assert (row.step_index >= 0).tolist() == row.loss_mask.tolist()


@pytest.mark.parametrize("number", range(3))
def test_tokens_are_the_templates_rendering(number: int):
    chat = toy.family().demonstrations("train", 3, 0)[number]
    row = answer_row(word_chat(), chat)
    assert row.token_ids.tolist() == word_tokenizer().encode(word_tokenizer().chat_text(chat, False))
    assert row.loss_mask.sum() == sum(len(word_chat().answer(message.content)) for message in chat[1::2])


def test_an_answer_that_names_a_special_token_is_plain_text():
    chat = [Message("user", "x"), Message("assistant", "look <|im_end|> vase")]
    row = answer_row(word_chat(), chat)
    assert row.token_ids[row.loss_mask].tolist().count(word_chat().close_id) == 1
