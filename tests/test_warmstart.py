"""The warm start: which tokens carry the loss; what is imitated and what held out; a start is made once and resumed."""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from empo2_jax import warmstart
from empo2_jax.algorithms.imitation import hold_out, transcripts
from empo2_jax.config import Config
from empo2_jax.config_file import load_config
from empo2_jax.envs import toy
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.models.hf_weights import load_model
from empo2_jax.prompts import tips_block
from empo2_jax.types import Message, Row
from empo2_jax.warmstart import Progress, answer_row, ensure_start, make_start
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


def test_runs_with_equal_settings_share_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[Path] = []

    def make(config: Config, family: EnvironmentFamily, folder: Path) -> None:
        made.append(folder)
        make_start(config, family, folder)

    monkeypatch.setattr(warmstart, "make_start", make)
    options = ("warmstart.updates=1", f'warmstart.shared_dir="{tmp_path}/starts"', "warmstart.seed=7")
    first = ensure_start(tiny(*options), toy.family(), tmp_path / "a" / "start")
    other = tiny(*options, "run.seed=3", "update.learning_rate=0.5")
    second = ensure_start(other, toy.family(), tmp_path / "b" / "start")
    assert len(made) == 1 and made[0].parent == tmp_path / "starts"
    chex.assert_trees_all_equal(load_file(first / "model.safetensors"), load_file(second / "model.safetensors"))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["start"]
    assert ensure_start(tiny(*options[:2]), toy.family(), tmp_path / "c") == tmp_path / "c"  # seed of the run: another
    assert len(set(made)) == 2
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"warmstart.shared_dir = .*/file/x: cannot be written"):
        ensure_start(tiny(f'warmstart.shared_dir="{tmp_path}/file/x"'), toy.family(), tmp_path / "d")


def test_a_start_may_see_more_problems_than_are_trained_on(tmp_path: Path):
    options = ("warmstart.source=gold", "warmstart.updates=1", "warmstart.variations=5")
    config = tiny(*options, "env.train_variations=2")
    folder = ensure_start(config, toy.family(variations=2), tmp_path / "start")
    assert json.loads((folder / "imitation.json").read_text())["transcripts"] == 5
    assert ensure_start(tiny(*options, "env.train_variations=3"), toy.family(), folder) == folder  # all the same to it


def test_transcripts_that_are_too_long_are_counted_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lengths = sorted(
        len(answer_row(word_chat(), chat).token_ids) for chat in toy.family().demonstrations("train", 12, 0)
    )
    longest = lengths[5]
    ensure_start(tiny(f"update.buckets=[{longest}]", f"rollout.max_length={longest}"), toy.family(), tmp_path / "start")
    left_out = sum(length > longest for length in lengths)
    told = f"{left_out} of 12 transcripts are longer than the largest of update.buckets = {longest}, and left out"
    assert left_out > 0 and told in capsys.readouterr().err


def test_an_interrupted_start_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = ("warmstart.held_out=0.3", "warmstart.held_out_every=1", "warmstart.patience=9")
    whole = ensure_start(tiny(*options), toy.family(), tmp_path / "whole")

    class Interrupting(warmstart.RunProgress):
        def update(self, done: int, metrics: dict[str, float]) -> None:
            if done == 4:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(warmstart, "RunProgress", Interrupting)
        ensure_start(tiny(*options), toy.family(), tmp_path / "cut")
    assert not (tmp_path / "cut").exists()
    assert [path.name for path in tmp_path.glob("cut.*.partial/checkpoints/*")] == ["2"]
    monkeypatch.setattr(warmstart, "transcripts", None)  # which were made, and are not made again
    cut = ensure_start(tiny(*options), toy.family(), tmp_path / "cut")
    chex.assert_trees_all_equal(load_file(cut / "model.safetensors"), load_file(whole / "model.safetensors"))
    for name in ("losses.json", "imitation.json"):
        assert (cut / name).read_text() == (whole / name).read_text()
    assert not list(tmp_path.glob("cut.*"))


def test_damaged_transcripts_of_an_interrupted_start_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(warmstart, "train", interrupt)
        ensure_start(tiny(), toy.family(), tmp_path / "cut")
    (kept,) = tmp_path.glob("cut.*.partial/transcripts.json")
    assert len(json.loads(kept.read_text())) == 12
    kept.write_text('[[{"role": "user"}]]')
    with pytest.raises(DataError, match=r"transcripts.json: .*content is missing"):
        ensure_start(tiny(), toy.family(), tmp_path / "cut")


def test_gold_paths_and_runs_are_filtered_and_come_in_the_order_of_the_sources(tmp_path: Path):
    config = tiny('warmstart.source=["gold","demonstrations"]', "warmstart.demonstrations=3").warmstart
    chats = transcripts(toy.family(), config, 0)
    assert [len(chat) for chat in chats[:3]] == [4, 4, 4]  # look, try
    assert chats[3:] == toy.family().demonstrations("train", 3, 0)
    with pytest.raises(ConfigError, match=r"source gold: none of 3 episodes passes min_score = -100\.0, max_steps = 1"):
        transcripts(
            toy.family(),
            tiny("warmstart.source=gold", "warmstart.max_steps=1", "warmstart.demonstrations=3").warmstart,
            0,
        )
    with pytest.raises(ConfigError, match=r"warmstart\.kinds are of demonstrations, which warmstart\.source does not"):
        tiny("warmstart.source=gold", "warmstart.kinds=tips")
    with pytest.raises(ConfigError, match=r"warmstart\.kinds: toy has no 'tips'; its kinds are none to choose from"):
        transcripts(toy.family(), tiny('warmstart.kinds=["tips"]').warmstart, 0)
    with pytest.raises(DataError, match="no recorded episodes"):
        transcripts(toy.family(), tiny(f"warmstart.source={tmp_path}").warmstart, 0)


def test_whole_problems_are_held_out():
    chats = [[Message("user", problem), Message("assistant", answer)] for problem in "abcd" for answer in "xy"]
    learned, apart = hold_out(chats, 0.25, seed=0)
    assert (len(learned), len(apart)) == (6, 2)
    assert len({chat[0].content for chat in apart}) == 1
    assert sorted(chat[0].content + chat[1].content for chat in [*learned, *apart]) == [
        p + a for p in "abcd" for a in "xy"
    ]
    assert hold_out(chats, 0.25, seed=0) == (learned, apart)
    told = [[Message("user", chat[0].content + tips_block(["x"])), chat[1]] for chat in chats]
    assert [len(part) for part in hold_out([*chats, *told], 0.25, seed=0)] == [12, 4]  # with tips and without
    assert hold_out(chats, 0.0, seed=0) == (chats, [])
    assert len(hold_out(chats, 0.99, seed=0)[0]) == 2  # something is left to learn from
    with pytest.raises(ConfigError, match="one problem alone"):
        hold_out(chats[:2], 0.5, seed=0)


def test_patience_counts_measurements_without_a_new_best():
    progress = Progress(held_out=[(0, 3.0), (2, 1.0), (4, 1.0), (6, 2.0)])
    assert progress.best() == 2
    assert [progress.ended(patience) for patience in (0, 1, 2, 3)] == [False, True, True, False]


def test_overfitting_ends_early_with_the_best_weights(tmp_path: Path):
    """A rate that only destroys: the untrained weights stay the best, and two measurements are enough to see it."""
    options = ["learning_rate=30.0", "held_out=0.5", "held_out_every=1", "patience=2", "updates=50"]
    config = tiny(*(f"warmstart.{option}" for option in options))
    family = toy.family()
    folder = ensure_start(config, family, tmp_path / "start")
    facts = json.loads((folder / "imitation.json").read_text())
    curve = facts["progress"]["held_out"]
    assert facts["kept_update"] == min(curve, key=lambda point: point[1])[0] == len(curve) - 3
    assert facts["progress"]["updates"] == facts["kept_update"] + 2
    assert facts["transcripts"] + facts["held_out"] == 12

    apart = hold_out(transcripts(family, config.warmstart, config.run.seed), 0.5, config.run.seed)[1]
    rows = [answer_row(word_chat(), chat, config.warmstart.context_weight) for chat in apart]
    expected = sum(model_loss(folder, row) for row in rows) / sum(r.token_weight.sum() for r in rows)
    np.testing.assert_allclose(min(curve, key=lambda point: point[1])[1], expected, rtol=1e-5)


def model_loss(folder: Path, row: Row) -> float:
    """Weighted negative log-likelihood of one row, without the learner."""
    model = load_model(folder)
    ids = jnp.asarray(row.token_ids)[None]
    logits = model(ids, jnp.arange(ids.shape[1], dtype=jnp.int32)[None], jnp.ones_like(ids)) @ model.head.T
    logprobs = np.asarray(jax.nn.log_softmax(logits))[0, np.arange(ids.shape[1] - 1), ids[0, 1:]]
    return -float((row.token_weight[1:] * logprobs).sum())
