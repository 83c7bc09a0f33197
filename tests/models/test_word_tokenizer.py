"""The words of texts are those that the tokenizer made of them gives back."""

from pathlib import Path

from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.models.word_tokenizer import words_of, write_word_tokenizer

TEXTS = ("Go to the kitchen.", "The non-living thing (an orange)")


def test_words_in_the_order_of_their_first_use_without_case() -> None:
    words = ["go", "to", "the", "kitchen", ".", "non", "-", "living", "thing", "(", "an", "orange", ")"]
    assert words_of(TEXTS) == words


def test_no_word_of_the_texts_is_unknown(tmp_path: Path) -> None:
    size = write_word_tokenizer(tmp_path, words_of(TEXTS))
    tokenizer = Tokenizer.load(tmp_path)
    assert size == 4 + 3 + 13 == tokenizer.size
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == "go to the kitchen ."
