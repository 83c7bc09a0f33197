"""The pinned semantics that concern sampling, prompts, tips and evaluation, by number, from the world to the loss."""

from typing import Any

import numpy as np
import pytest
from flax import nnx

from empo2_jax.adaptation import LABEL, adapt, record
from empo2_jax.config import EvaluationConfig, MemoryConfig, UpdateConfig
from empo2_jax.data.packing import branch_room
from empo2_jax.data.rows import acting_rows, build_rows
from empo2_jax.envs import toy
from empo2_jax.evaluation import evaluate
from empo2_jax.learner.ledgers import fill, scorer
from empo2_jax.learner.optim import policy_optimizer
from empo2_jax.learner.step import Learner, supervised_loss
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.rollout.collect import Assignment
from empo2_jax.rollout.jax_engine import JaxEngine
from empo2_jax.rollout.reflect import PolicyTipWriter, ScriptedTipWriter
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.types import Episode, Mode, StopReason
from tests.fixtures.worlds import (
    CorridorFamily,
    babble,
    corridor,
    empty_memory,
    make_collector,
    remember,
    spoken,
    word_chat,
    word_tokenizer,
)

TEMPERATURE = 0.7


def collect(family: Any, modes: list[Mode], *, engine: Any = None, memory: Any = None, **how: Any) -> list[Episode]:
    collector = make_collector(engine or ReplayEngine(babble(word_chat())), family, **how)
    assignments = [Assignment(f"i0/g0/e{number}", corridor(), mode) for number, mode in enumerate(modes)]
    writer = PolicyTipWriter(
        word_chat(), family, MemoryConfig(tip_max_tokens=8), temperature=1.0, seed=0, banned_from=10_000
    )
    try:
        return collector.collect(assignments, temperature=TEMPERATURE, memory=memory, writer=writer)
    finally:
        collector.close()


def memory_with_tips(steps: int = 4) -> Any:
    memory = empty_memory()
    said = ReplayEngine(spoken(word_chat(), lambda request: "look in the vase"))
    remember(memory, collect(CorridorFamily(steps), [Mode.ON_POLICY], engine=said))
    return memory


@pytest.mark.parametrize("placement", ["history", "latest"])
def test_05_engine_and_trainer_agree_at_the_sampling_temperature_under_the_acting_prompt(placement: str):
    shape = Qwen2Config(
        vocab_size=word_tokenizer().size,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=24,
        tie_embeddings=True,
        initializer_range=0.3,
    )
    model = Qwen2(shape, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    engine = JaxEngine(model, slots=3, max_length=256)
    episodes = collect(CorridorFamily(3), list(Mode), engine=engine, memory=memory_with_tips(), placement=placement)
    assert all(step.tips for step in episodes[Mode.OFF_POLICY].steps)
    learner = Learner(
        graphdef, policy_optimizer(UpdateConfig()), supervised_loss, temperature=TEMPERATURE, remat="none"
    )
    score = scorer(learner, params, [256], 1024)
    room = branch_room([256], 1024) if placement == "latest" else None
    rows = build_rows(episodes, [0.0] * 3, branch_room=room)
    filled, gaps = fill(rows, episodes, score, denominator="behavior", correction_cap=2.0, branch_room=room)
    for row in filled:
        expected = row.behavior_logprobs[row.loss_mask]
        np.testing.assert_allclose(row.denominator_logprobs[row.loss_mask], expected, atol=1e-4)
        np.testing.assert_allclose(row.rollout_weight[row.loss_mask], 1.0, atol=1e-4)
    assert gaps["mismatch/logprob_abs_diff_max"] < 1e-4
    bare = score(rows)[Mode.OFF_POLICY][rows[Mode.OFF_POLICY].loss_mask]
    assert np.abs(bare - rows[Mode.OFF_POLICY].behavior_logprobs[rows[Mode.OFF_POLICY].loss_mask]).max() > 1e-2


def test_06_a_sampled_stop_token_is_trained_and_an_inserted_one_is_context():
    chat = word_chat()
    words = chat.tokenizer.encode("look in the vase")
    said = [*words, chat.close_id]
    for cut, trained in ((8, said), (3, words[:3])):  # stopped by itself, cut at the limit of tokens
        (episode,) = collect(
            CorridorFamily(2), [Mode.ON_POLICY], engine=ReplayEngine(lambda request: said), max_action_tokens=cut
        )
        (row,) = build_rows([episode], [1.0])
        assert row.token_ids[row.loss_mask].tolist() == trained * 2
        end = len(episode.steps[0].prompt_ids) + len(trained)
        assert [bool(step.truncated) for step in episode.steps] == [cut == 3] * 2
        closing = end - (cut == 8)
        assert row.token_ids[closing] == chat.close_id
        assert row.loss_mask[closing] == (cut == 8)


def test_06_history_holds_sampled_ids_and_not_resolved_actions():
    chat = word_chat()
    sampled = chat.tokenizer.encode("[UNK] look [UNK] in the vase")  # reads as the action without the unknown words
    family = toy.family(variations=1)
    collector = make_collector(ReplayEngine(lambda request: [*sampled, chat.close_id]), family, step_limit=2)
    (episode,) = collector.collect([Assignment("a", family.tasks("train")[0])], temperature=1.0)
    collector.close()
    first, second = episode.steps
    assert first.resolved == "look in the vase"
    assert second.prompt_ids[len(first.prompt_ids) :][: len(sampled)].tolist() == sampled


@pytest.mark.parametrize("mode", list(Mode))
def test_07_history_gives_one_row_per_episode_under_the_loss_prompt(mode: Mode):
    episodes = collect(CorridorFamily(5), [mode], memory=memory_with_tips(5))
    (row,) = build_rows(episodes, [1.0])
    (earlier,) = word_tokenizer().encode("earlier")
    assert (earlier in row.token_ids) == (mode == Mode.ON_POLICY_WITH_MEMORY)
    assert row.loss_mask.sum() == sum(len(step.action_ids) for step in episodes[0].steps)
    acting = acting_rows(episodes)
    assert len(acting) == (mode == Mode.OFF_POLICY)
    for other in acting:
        assert other.token_ids.tolist().count(earlier) == 5
        assert other.token_ids[other.loss_mask].tolist() == row.token_ids[row.loss_mask].tolist()


def test_07_latest_puts_the_loss_on_branches_on_policy_and_on_the_trunk_off_policy():
    episodes = collect(CorridorFamily(5), list(Mode), memory=memory_with_tips(5), placement="latest")
    (earlier,) = word_tokenizer().encode("earlier")
    plain, on_memory, off = build_rows(episodes, [1.0] * 3, branch_room=10_000)
    for row, episode in zip((plain, on_memory, off), episodes, strict=True):
        last = episode.steps[-1]
        trunk = np.concatenate([last.bare_prompt_ids, last.action_ids])
        assert row.token_ids[: row.trunk].tolist() == trunk.tolist()
        assert earlier not in trunk
        assert row.loss_mask.sum() == sum(len(step.action_ids) for step in episode.steps)
    assert not plain.branches and not off.branches
    assert not on_memory.loss_mask[: on_memory.trunk].any()
    (acting,) = acting_rows(episodes, 10_000)
    for row, episode in ((on_memory, episodes[1]), (acting, episodes[2])):
        start = row.trunk
        for step, branch in zip(episode.steps, row.branches, strict=True):
            whole = np.concatenate([step.prompt_ids, step.action_ids]).tolist()
            own = row.token_ids[start : start + branch.length].tolist()
            assert row.token_ids[: branch.cut].tolist() + own == whole
            assert own.count(earlier) == 1
            start += branch.length
        assert start == len(row.token_ids)


def test_07_tips_of_earlier_turns_stay_and_nothing_is_cut_out():
    (episode,) = collect(CorridorFamily(4), [Mode.OFF_POLICY], memory=memory_with_tips(4))
    tips = [step.tips for step in episode.steps]
    assert all(tips)
    for number, step in enumerate(episode.steps):
        text = word_chat().text(step.prompt_ids)
        assert text.count("earlier episodes") == number + 1
        for block in tips[: number + 1]:
            flat = " ".join(word_tokenizer().decode(word_tokenizer().encode(block[0])).split())
            assert flat in text


def test_11_the_state_reached_counts_for_novelty_and_16_the_state_before_is_the_anchor():
    (episode,) = collect(CorridorFamily(4), [Mode.ON_POLICY])
    first = f"the {toy.PLACES[0]} is empty ."
    reached = [step.state for step in episode.steps]
    assert first not in reached and len(set(reached)) == 4
    assert [step.anchor for step in episode.steps] == [first, *reached[:-1]]


def test_13_tips_are_never_trained_on():
    (episode,) = collect(CorridorFamily(3), [Mode.ON_POLICY_WITH_MEMORY], memory=memory_with_tips())
    assert episode.tip and episode.tip_tokens
    (row,) = build_rows([episode], [1.0])
    last = episode.steps[-1]
    assert len(row.token_ids) == len(last.prompt_ids) + len(last.action_ids)  # nothing of the request or the tip
    trained = row.token_ids[row.loss_mask].tolist()
    assert trained == [token for step in episode.steps for token in step.action_ids.tolist()]


def test_13_invalid_episodes_write_no_tip_and_limits_do():
    family = CorridorFamily(9, {(0, 2): 9})
    (dead,) = collect(family, [Mode.ON_POLICY])
    (limited,) = collect(CorridorFamily(9), [Mode.ON_POLICY], step_limit=2)
    assert (dead.stop_reason, dead.tip, dead.tip_tokens) == (StopReason.ENV_ERROR, "", 0)
    assert limited.stop_reason == StopReason.STEP_LIMIT and limited.tip_tokens > 0


def test_15_evaluation_is_repeatable_without_memory_and_writes_nothing():
    family, memory = toy.family(variations=2), memory_with_tips()
    before = memory.content_hash()
    config = EvaluationConfig(variations=2, repeats=2, temperature=0.4)
    temperatures: set[float] = set()

    def script(request: Any) -> list[int]:
        temperatures.add(request.sampling.temperature)
        return babble(word_chat())(request)

    panels = []
    for seed in (0, 0, 1):
        collector = make_collector(ReplayEngine(script), family, step_limit=3, seed=seed)
        panels.append(evaluate(collector, family, config))
        collector.close()
    actions = [[s.action_ids.tolist() for e in panel.episodes for s in e.steps] for panel in panels]
    assert actions[0] == actions[1] == actions[2]  # the seed of the run does not enter the panel
    assert temperatures == {0.4}
    assert all(episode.mode == Mode.ON_POLICY and not episode.tip for episode in panels[0].episodes)
    assert memory.content_hash() == before


def test_17_adaptation_learns_by_memory_alone_and_its_best_never_falls():
    family, memory = toy.family(variations=2), empty_memory()
    place, _ = toy.SECRETS[0]

    def words(request: Any) -> str:
        return f"look in the {place}" if request.session == "adaptation/toy/bulb/0/t2" else "wait"

    collector = make_collector(ReplayEngine(spoken(word_chat(), words)), family, step_limit=2)
    trials = []
    for trial in adapt(
        collector,
        family.tasks("test"),
        memory,
        ScriptedTipWriter(family),
        trials=3,
        temperature=0.4,
        scope="variation",
        seed=0,
    ):
        trials.append(trial)
        assert len({tip.episode for tip in memory.retrieve_many([("toy/bulb/0", "light the lamp")])[0]}) <= len(trials)
    collector.close()
    line = record(trials, iteration=7, split="test", memory="empty")
    assert line["label"] == LABEL == "test-time adaptation (sees test rewards)"
    assert (line["score"], line["best_score"]) == ([0.0, 15.0, 0.0], [0.0, 15.0, 15.0])  # mean of two houses
    # `wait` is no word of this world: an empty action
    nothing, found = "nothing .", f"the bulb is in the {place} ."
    waited, looked = f"{nothing} (action :  ; score : 0 )", f"{found} (action : look in the {place} ; score : 30 )"
    assert [
        (row["task"], row["variation"], row["scores"], row["tips_shown"], row["tips_written"]) for row in line["rows"]
    ] == [
        ("bulb", 0, [0.0, 30.0, 0.0], ["", waited, looked], [nothing, found, nothing]),
        ("bulb", 1, [0.0, 0.0, 0.0], ["", waited, waited], [nothing] * 3),
    ]
    saw = [[bool(step.tips) for episode in trial.now.episodes for step in episode.steps] for trial in trials]
    assert not any(saw[0]) and all(saw[1]) and all(saw[2])  # tips of a trial are seen from the next one on
    shown = trials[2].now.episodes[0].steps[0].tips[0]
    assert shown.startswith(f"the bulb is in the {place} .")  # of the best trial
