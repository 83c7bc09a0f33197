"""Pieces of texts are those that the tokenizer made of them gives back, character by character."""

from pathlib import Path

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerFast

from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.models.word_tokenizer import pieces_of, write_word_tokenizer
from empo2_jax.rollout.chat import Chat

TEXTS = ("Go to the kitchen.\nclick[x-large]", 'The non-living thing (24"/36")')


def test_pieces_in_the_order_of_their_first_use_without_case() -> None:
    first = ["go", " to", " the", " kitchen", ".", "\n", "click", "[", "x", "-", "large", "]"]
    second = ["the", " non", "living", " thing", " (", "24", '"', "/", "36", ")"]
    assert pieces_of(TEXTS) == first + second


def test_pieces_give_the_text_back_with_its_lines(tmp_path: Path) -> None:
    size = write_word_tokenizer(tmp_path, pieces_of(TEXTS), pieces=True)
    tokenizer = Tokenizer.load(tmp_path)
    assert size == 4 + 3 + 22 == tokenizer.size  # the line break is one of the texts' pieces
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text.lower()
    chat = Chat(tokenizer)
    answer = chat.answer(TEXTS[0])
    assert chat.text(answer) == TEXTS[0].lower() and answer[-1] == chat.close_id
    assert tokenizer.decode(chat.following(answer, "the kitchen").tolist()) == "\nuser\nthe kitchen\nassistant\n"


def test_words_of_a_closed_vocabulary_are_joined_by_spaces(tmp_path: Path) -> None:
    size = write_word_tokenizer(tmp_path, ["go", "to", "the", "kitchen", "."])
    tokenizer = Tokenizer.load(tmp_path)
    assert size == 4 + 3 + 5 == tokenizer.size
    assert tokenizer.decode(tokenizer.encode("Go to the kitchen.")) == "go to the kitchen ."


@pytest.mark.parametrize("pieces", [False, True])
def test_transformers_reads_it_as_we_do(pieces: bool, tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path, pieces_of(TEXTS), pieces=pieces)
    stops = GenerationConfig.from_pretrained(tmp_path).eos_token_id
    ours, theirs = Tokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tuple(stops) == ours.stop_ids == (2, 0)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text) and len(ids) > 8
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
