"""Ids, chat text and stop ids of a byte-level tokenizer made here."""

import json
import re
from pathlib import Path

import pytest

from empo2_jax.errors import DataError
from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.rollout.chat import Chat
from empo2_jax.types import Message

VOCAB = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ", "ab", "Ġab"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(folder: Path, settings: dict | None = None, **files: dict) -> Path:
    added = [
        {"id": i, "content": VOCAB[i], "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for i in range(3)
    ]
    content = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(VOCAB)}, "merges": [["a", "b"], ["Ġ", "ab"]]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE} if settings is None else settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def ids(*tokens: str) -> list[int]:
    return [VOCAB.index(token) for token in tokens]


def test_text_to_ids_and_back(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    assert tokenizer.encode("ab abc") == ids("ab", "Ġab", "c")
    assert tokenizer.encode("ab<|im_end|>") == ids("ab", "<|im_end|>")
    assert tokenizer.encode("") == []
    assert tokenizer.decode(ids("ab", "Ġab", "c", "<|im_end|>")) == "ab abc"
    assert tokenizer.size == len(VOCAB)


def test_model_type_does_not_change_the_ids(tmp_path: Path) -> None:
    expected = Tokenizer.load(write(tmp_path)).encode("ab  abc")
    settings = {"tokenizer_class": "Qwen2Tokenizer", "chat_template": TEMPLATE}
    tokenizer = Tokenizer.load(write(tmp_path, settings, config={"model_type": "qwen2"}))
    assert tokenizer.encode("ab  abc") == expected == ids("ab", "Ġ", "Ġab", "c")


@pytest.mark.parametrize("place", ["file", "settings", "list"])
def test_chat_text_follows_the_folders_template(tmp_path: Path, place: str) -> None:
    write(tmp_path)
    if place == "file":
        write(tmp_path, {"chat_template": "wrong"})
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    if place == "list":
        write(tmp_path, {"chat_template": [{"name": "default", "template": TEMPLATE}]})
    tokenizer = Tokenizer.load(tmp_path)
    turns = [Message("user", "ab"), Message("assistant", "c")]
    text = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
    assert tokenizer.chat_text(turns, False) == text
    assert tokenizer.chat_text(turns, True) == text + "<|im_start|>assistant\n"


def test_stop_ids_start_with_the_generation_config(tmp_path: Path) -> None:
    assert Tokenizer.load(write(tmp_path)).stop_ids == (2, 0)
    assert Tokenizer.load(write(tmp_path, generation_config={"eos_token_id": [0, 5]})).stop_ids == (0, 5, 2)
    assert Tokenizer.load(write(tmp_path, config={"eos_token_id": 7})).stop_ids == (0, 5, 7, 2)


def test_a_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    tokenizer.check_fits(len(VOCAB), tmp_path)
    with pytest.raises(DataError, match=f"ids up to {len(VOCAB) - 1}, the model's vocab_size is {len(VOCAB) - 1}"):
        tokenizer.check_fits(len(VOCAB) - 1, tmp_path)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read: No such file"):
        Tokenizer.load(tmp_path)
    tokenizer = Tokenizer.load(write(tmp_path, {}))
    with pytest.raises(DataError, match="no chat template"):
        tokenizer.chat_text([Message("user", "ab")], True)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(DataError, match="a table of keys and values is allowed"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "not a tokenizer: "),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "a tokenizer without tokens"),
        ('{"model": {"type": "nonsense"}}', "not a tokenizer: "),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=rf"tokenizer\.json: {message}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{% if",
        "{{ 1 / 0 }}",
        "{{ messages[99].role }}",
        "{{ messages.no() }}",
        "{{ cycler.__init__.__globals__.os.system('touch FILE') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for n in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_template_that_fails_or_reaches_for_python_is_one_error(template: str, tmp_path: Path) -> None:
    folder = write(tmp_path, {"eos_token": "<|im_end|>", "chat_template": template.replace("FILE", f"{tmp_path}/made")})
    with pytest.raises(DataError, match=r": chat template: \w+: "):
        Tokenizer.load(folder).chat_text([Message("user", "look")], True)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "a user turn must appear once"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "earlier turns must not change"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "an assistant turn must be closed by a token"),
    ],
)
def test_a_template_that_no_transcript_can_have_is_named(template: str, said: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, {"eos_token": "<|im_end|>", "chat_template": template}))
    with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path))}: chat template: .*{said}"):
        Chat(tokenizer)
