"""Word-level tokenizers in the Hugging Face format, for worlds of few words (the toy world) and tiny policies.

Of a closed vocabulary the words alone count: texts are decoded with a space between all of them. Where the language is
open, pieces keep the space before them and line breaks are tokens, so that an answer of several lines, or a name like
`x-large`, comes out as the world wants it.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[UNK]")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
PIECE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PIECE = r" ?\w+| ?[^\w\s]|\s"


def pieces_of(texts: Iterable[str]) -> list[str]:
    """Distinct pieces of the texts without case, in the order of their first use: words and signs with the space before
    them, line breaks.
    """
    split = _split()
    return list(dict.fromkeys(piece for text in texts for piece, _ in split.pre_tokenize_str(text.lower())))


def write_word_tokenizer(folder: Path, vocabulary: Sequence[str], *, pieces: bool = False) -> int:
    """Write tokenizer.json, its chat template, settings and stop ids into `folder`; returns the number of ids.

    Args:
        folder: Made if it is not there.
        vocabulary: Words, or what `pieces_of` gives.
        pieces: Whether they are pieces.
    """
    names = dict.fromkeys([*SPECIAL, "system", "user", "assistant", *(["\n"] if pieces else []), *vocabulary])
    numbers = {word: index for index, word in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))  # noqa: S106  (a token, not a key)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = _split() if pieces else pre_tokenizers.Whitespace()
    if pieces:
        tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = PIECE_TEMPLATE if pieces else CHAT_TEMPLATE
    settings = {"chat_template": template, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    stops = {"eos_token_id": [numbers["<|im_end|>"], numbers["<|endoftext|>"]]}  # for `generate` of transformers
    (folder / "generation_config.json").write_text(json.dumps(stops), encoding="utf-8")
    return len(names)


def _split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(_PIECE), "isolated")
