"""The environment and its family on the synthetic catalogue and on hand-made data: rewards, penalties, bad input."""

import logging
from pathlib import Path

import pytest

from empo2_jax.config import EnvConfig
from empo2_jax.config_file import load_config
from empo2_jax.envs import webshop
from empo2_jax.envs.webshop import WebShopEnvironment, WebShopFamily
from empo2_jax.envs.webshop.shopper import plan
from empo2_jax.errors import ConfigError, EnvError
from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.models.word_tokenizer import pieces_of, write_word_tokenizer
from empo2_jax.types import Observation, Task
from tests.fixtures.shop import INJECTION, raw, write_data

ASIN = "B000000001"
HUMAN = {
    ASIN: [
        {
            "instruction": "i need trail shoes with arch support in size 9.5, navy blue.",
            "instruction_attributes": ["arch support"],
            "instruction_options": ["9.5", "navy blue"],
        }
    ]
}
BUY = ["search[trail shoes]", f"click[{ASIN}]", "click[9.5]", "click[navy blue]", "click[buy now]"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMPO2_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def family() -> WebShopFamily:
    return webshop.family(panel=20)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One product, an injected one, and one instruction."""
    products = [raw(ASIN, pricing="$20.00"), raw("B000000002", name=f"Trail Lamp {INJECTION}", query="lamp")]
    attributes = {ASIN: {"attributes": ["arch support"]}}
    return write_data(tmp_path_factory.mktemp("webshop") / "data", products, attributes, HUMAN)


def shopper(data: Path, **options) -> WebShopEnvironment:
    environment = webshop.family(data=data, **options).make()
    environment.reset(Task("webshop", "human", 0), 0)
    return environment


def shop(environment: WebShopEnvironment, actions: list[str]) -> Observation:
    for action in actions:
        observation = environment.step(action)
        assert observation.resolution == "exact", action
    return observation


@pytest.mark.parametrize(
    ("actions", "score"),
    [
        (BUY, 100.0),  # 1 attribute, 2 options, price: 4 / 4
        (["search[x trail]", f"click[{ASIN}]", "click[buy now]"], 50.0),  # 2 / 4
        ([*BUY[:2], "click[light pink]", "click[9.5]", "click[buy now]"], 75.0),
        # The lamp shares the noun "trail": 1/3 > 0.2, so the type is right; no attribute, both options, price: 3 / 4.
        (["search[lamp]", "click[b000000002]", "click[9.5]", "click[navy blue]", "click[buy now]"], 75.0),
    ],
)
def test_points_are_a_hundred_times_the_reward(data: Path, actions: list[str], score: float) -> None:
    environment = shopper(data)
    last = shop(environment, actions)
    assert (last.score, last.reward, last.done, last.success) == (score, score, True, score == 100.0)
    assert last.text.endswith(f"Your score (min 0, max 1) [SEP] {score / 100:.4g}")
    assert environment.reward is not None and environment.reward.parts == 4
    assert environment.admissible_actions() == []


def test_the_prompt_holds_wish_page_and_actions(data: Path) -> None:
    environment = shopper(data)
    family = webshop.family(data=data)
    first = environment.reset(Task("webshop", "human", 0), 0)
    assert first.text == "Search\nPossible actions: search[your words]"
    turn = family.first_turn(environment.goal, first.text)
    assert environment.goal.startswith("i need trail shoes with arch support in size 9.5, navy blue, and price lower")
    assert environment.goal in turn and turn.endswith(first.text)
    results = environment.step("I search.\nSEARCH[Trail]")
    assert (results.resolved, results.resolution, results.reward) == ("search[trail]", "exact", 0.0)
    assert results.text.endswith("Possible actions: click[back to search], click[b000000001], click[b000000002]")
    assert results.text.startswith(results.state)


def test_the_state_tells_chosen_options_apart(data: Path) -> None:
    environment = shopper(data)
    item = shop(environment, BUY[:2])
    chosen = environment.step("click[9.5]")
    assert chosen.text == item.text and chosen.state == f"{item.state} [SEP] chosen size: 9.5"


def test_readable_pages_are_an_option(data: Path) -> None:
    environment = shopper(data, readable=True)
    assert "[Buy Now]" in shop(environment, BUY[:2]).text.splitlines()


@pytest.mark.parametrize(
    "answer",
    [
        *("", "search[]", "click[size]", "click[red]", "click[b000000009]", "click[buy now]", "x" * 100_000),
        *("search[" + "y" * 100_000 + "]", "\x00\x1b[2J", "click[\x00]", INJECTION, "two\nlines", "\ud800"),
    ],
)
def test_bad_answers_are_ordinary_observations(data: Path, answer: str) -> None:
    environment = shopper(data, penalty=0.1)
    before = environment.step("search[lamp]")
    after = environment.step(answer)
    assert (after.resolution, after.resolved, after.done, after.score) == ("invalid", "", False, 0.0)
    assert after.reward == -0.1 and after.state == before.state
    assert after.text.startswith("Nothing happened") and after.text.endswith(before.text)


def test_penalties_never_touch_the_score(data: Path) -> None:
    environment = shopper(data, penalty=1.0)
    rewards = [environment.step(action).reward for action in ["dance", *BUY[:4], "click[dance]"]]
    last = environment.step(BUY[4])
    assert rewards == [-1.0, 0, 0, 0, 0, -1.0]
    assert (last.reward, last.score, last.success) == (100.0, 100.0, True)
    after = environment.step("dance")
    assert (after.done, after.reward, after.score) == (True, 0.0, 100.0)


def test_injected_text_stands_in_the_page_and_does_nothing(data: Path) -> None:
    environment = shopper(data)
    page = shop(environment, ["search[lamp]"])
    assert INJECTION in page.text and not page.done
    assert environment.admissible_actions() == ["click[b000000002]", "click[back to search]"]


def test_an_environment_without_a_reset_or_goal_is_an_error(data: Path) -> None:
    environment = webshop.family(data=data).make()
    with pytest.raises(EnvError, match="reset first"):
        environment.step("search[x]")
    for task in (Task("webshop", "human", 1), Task("webshop", "human", -1), Task("webshop", "robot", 0)):
        with pytest.raises(EnvError, match="webshop has human 0 to 0"):
            environment.reset(task, 0)


def test_splits_of_the_synthetic_catalogue(family: WebShopFamily, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        both = webshop.family(tasks=["human", "synthetic-original-order"])
    assert "synthetic catalogue is used" in caplog.text
    splits = [both.tasks(split) for split in ("train", "dev", "test")]
    assert sum(map(len, splits)) == len(set().union(*splits)) > 1500
    ids = [{both.goals[task.name][task.variation].id for task in split} for split in splits]
    assert not ids[0] & ids[1] and not ids[0] & ids[2] and not ids[1] & ids[2]
    start = len(both.goals["synthetic-original-order"]) // 3
    assert min(task.variation for task in splits[0] if task.name.startswith("synthetic")) == start
    assert [len(family.tasks(split)) for split in ("dev", "test")] == [20, 20]
    assert family.tasks("test") == [Task("webshop", "human", place) for place in range(20)]
    with pytest.raises(ConfigError, match="unknown split"):
        family.tasks("validation")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["humans"], "no goals 'humans'; the nearest is 'human'"),
        (["human", "human-original-order"], "two orders"),
    ],
)
def test_unknown_or_contradictory_tasks(tasks: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        webshop.family(tasks=tasks)


def test_goals_that_the_data_does_not_have(data: Path) -> None:
    with pytest.raises(ConfigError, match="the data has no synthetic goals"):
        webshop.family(data=data, tasks=["synthetic"])


def test_the_configuration_reaches_the_family(data: Path) -> None:
    config = EnvConfig(name="webshop", data=str(data), invalid_penalty=0.5, train_variations=3)
    family = webshop.from_config(config, panel=1, workers=4)
    assert family.tasks("train") == [Task("webshop", "human", 0)] and len(family.catalogue) == 2
    with pytest.raises(ConfigError, match="too few goals for a test split: 1"):
        family.tasks("test")
    environment = family.make()
    environment.reset(Task("webshop", "human", 0), 0)
    assert environment.step("dance").reward == -0.5


def test_shipped_configurations_make_a_family() -> None:
    config = load_config(Path(__file__).parents[3] / "configs" / "webshop.toml")
    family = webshop.from_config(config.env, panel=config.evaluation.variations, workers=1)
    assert len(family.tasks("train")) == config.env.train_variations
    assert config.memory.scope == "task"


def test_the_scripted_shopper_buys_well_within_the_step_limit(family: WebShopFamily) -> None:
    environment, scores = family.make(), []
    for task in family.tasks("train")[:30]:
        environment.reset(task, 0)
        assert environment.wanted is not None
        answers = plan(environment.wanted, family.catalogue, family.nouns, look=True)
        assert len(answers) <= 15
        scores.append(shop(environment, answers).score)
    assert sum(scores) / len(scores) >= 95.0


def test_every_admissible_action_is_accepted_on_the_way(family: WebShopFamily) -> None:
    environment = family.make()
    task = family.tasks("train")[1]
    environment.reset(task, 0)
    assert environment.wanted is not None
    answers = plan(environment.wanted, family.catalogue, family.nouns)
    for count in range(len(answers)):
        environment.reset(task, 0)
        for answer in answers[:count]:
            environment.step(answer)
        session = environment.session
        for action in environment.admissible_actions():
            environment.session = session
            assert environment.step(action).resolution == "exact", action
            if environment.session.page == "done":
                break


def test_problems_by_number_and_their_solutions(family: WebShopFamily) -> None:
    task = family.task("human", 7)
    environment = family.make()
    environment.reset(task, 0)
    assert shop(environment, family.solution(task)).success
    for name, variation in (("human", 10_000), ("human", -1), ("robot", 0)):
        with pytest.raises(ConfigError, match=f"webshop/{name}/{variation}: webshop has human 0 to "):
            family.task(name, variation)


def test_a_goal_that_cannot_be_met_has_no_solution(tmp_path: Path) -> None:
    wish = {"instruction": "shoes", "instruction_attributes": ["made of gold"], "instruction_options": []}
    family = webshop.family(data=write_data(tmp_path / "data", [raw(ASIN)], {}, {ASIN: [wish]}))
    assert family.solution(Task("webshop", "human", 0)) == []


def test_demonstrations_think_act_and_close_with_a_tip(family: WebShopFamily) -> None:
    chats = family.demonstrations("train", 6, 0)
    assert len(chats) == 6 and chats != family.demonstrations("train", 6, 1)
    assert [("Tips from earlier" in chat[0].content) for chat in chats] == [False, False, True] * 2
    assert "click[features]" in "".join(message.content for message in chats[1])
    assert all("Tips from earlier" in chat[0].content for chat in family.demonstrations("train", 3, 0, ("tip",)))
    for chat in chats:
        *answers, tip = [message.content for message in chat if message.role == "assistant"]
        assert all(len(answer.splitlines()) == 2 for answer in answers)
        assert answers[-1].endswith("click[buy now]")
        assert tip.startswith("Searching for ") and "\n" not in tip
        assert "was worth 100 of 100" in chat[-2].content


@pytest.mark.parametrize(
    ("steps", "tip"),
    [
        ([], ""),
        ([("dance", "")], "Nothing was searched; begin with search[...] and the main words of the wish."),
        ([("a\nsearch[red shoes]", "")], "Searched for 'red shoes' but bought nothing; buy before the turns run out."),
        ([("", ""), ("search[x]", ""), ("click[b1]", ""), ("click[buy now]", "")], "Searching for 'x', then click[b1]"),
    ],
)
def test_scripted_tips(family: WebShopFamily, steps, tip: str) -> None:
    made = family.scripted_tip("goal", steps, 40.0)
    assert made.startswith(tip) and bool(made) == bool(tip)


def test_the_synthetic_catalogue_has_as_many_products_as_asked_for():
    config = EnvConfig(name="webshop", products=40, train_variations=99)
    family = webshop.from_config(config, panel=99, workers=1)
    assert (family.catalogue.counts.products, len(family.goals["human"])) == (40, 57)
    assert [len(family.tasks(split)) for split in ("train", "dev", "test")] == [29, 9, 19]
    assert all(family.solution(task) for task in family.tasks("test"))


def test_a_policy_of_word_pieces_can_say_every_scripted_answer(family: WebShopFamily, tmp_path: Path):
    """Thought, line break and action of unseen goals survive the tokenizer made of training chats."""
    chats = family.demonstrations("train", 300, 0)
    write_word_tokenizer(tmp_path, pieces_of(message.content for chat in chats for message in chat), pieces=True)
    tokenizer, environment, said = Tokenizer.load(tmp_path), family.make(), 0
    for task in family.tasks("test"):
        environment.reset(task, 0)
        assert environment.wanted is not None
        answers = plan(environment.wanted, family.catalogue, family.nouns)
        texts = [tokenizer.decode(tokenizer.encode(answer)) for answer in answers]
        if texts == [answer.lower() for answer in answers]:  # no number that the chats lack
            assert shop(environment, texts).done
            said += 1
    assert said >= 18
