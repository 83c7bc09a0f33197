"""A word-level tokenizer in the Hugging Face format, for worlds of few words (the toy world) and tiny policies."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[UNK]")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def words_of(texts: Iterable[str]) -> list[str]:
    """Distinct words of the texts as this tokenizer splits them, in the order of their first use."""
    split = pre_tokenizers.Whitespace()
    return list(dict.fromkeys(word for text in texts for word, _ in split.pre_tokenize_str(text.lower())))


def write_word_tokenizer(folder: Path, vocabulary: Sequence[str]) -> int:
    """Write tokenizer.json, its chat template and settings into `folder`; returns the number of ids."""
    names = dict.fromkeys([*SPECIAL, "system", "user", "assistant", *vocabulary])
    numbers = {word: index for index, word in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))  # noqa: S106  (a token, not a key)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return len(names)
