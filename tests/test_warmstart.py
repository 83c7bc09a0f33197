"""The warm start: which tokens carry the loss; a start is made once, reused, refused for others and resumed."""

import json
from pathlib import Path

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file

from empo2_jax import warmstart
from empo2_jax.config import Config
from empo2_jax.config_file import load_config
from empo2_jax.envs import toy
from empo2_jax.errors import ConfigError
from empo2_jax.types import Message
from empo2_jax.warmstart import answer_row, ensure_start
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


def test_prompts_weigh_what_the_configuration_says():
    bare, both = answer_row(word_chat(), CHAT), answer_row(word_chat(), CHAT, 0.25)
    assert both.token_ids.tolist() == bare.token_ids.tolist()
    assert both.token_weight[bare.loss_mask].tolist() == [1.0] * int(bare.loss_mask.sum())
    assert both.token_weight[0] == 0.0 and not both.loss_mask[0]
    others = ~bare.loss_mask
    others[0] = False
    assert both.token_weight[others].tolist() == [0.25] * int(others.sum())


def tiny(*overrides: str) -> Config:
    """Five updates of a model of one layer."""
    small = {"updates": 5, "demonstrations": 12, "batch_episodes": 2, "checkpoint_every": 2, "context_weight": 0.3}
    small |= {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 16}
    options = [f"warmstart.{key}={value}" for key, value in small.items()]
    return load_config(Path(__file__).parents[1] / "configs" / "toy_start.toml", [*options, *overrides])


def test_a_start_is_made_once_and_refused_for_other_settings(tmp_path: Path):
    folder = ensure_start(tiny(), toy.family(), tmp_path / "start")
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert len(json.loads((folder / "losses.json").read_text())) == 5
    assert {path.name for path in tmp_path.iterdir()} == {"start"}
    assert ensure_start(tiny("env.workers=3"), toy.family(), folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    with pytest.raises(ConfigError, match="made by another configuration"):
        ensure_start(tiny("warmstart.learning_rate=0.001"), toy.family(), folder)


def test_an_interrupted_start_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = ensure_start(tiny(), toy.family(), tmp_path / "whole")

    class Interrupting(warmstart.RunProgress):
        def update(self, done: int, metrics: dict[str, float]) -> None:
            if done == 4:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(warmstart, "RunProgress", Interrupting)
        ensure_start(tiny(), toy.family(), tmp_path / "cut")
    assert not (tmp_path / "cut").exists()
    assert [path.name for path in tmp_path.glob("cut.*.partial/checkpoints/*")] == ["2"]
    cut = ensure_start(tiny(), toy.family(), tmp_path / "cut")
    chex.assert_trees_all_equal(load_file(cut / "model.safetensors"), load_file(whole / "model.safetensors"))
    assert (cut / "losses.json").read_text() == (whole / "losses.json").read_text()
    assert not list(tmp_path.glob("cut.*"))
