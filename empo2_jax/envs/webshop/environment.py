"""WebShop as an environment: goals as tasks, rewards in points (100 × the published reward).

A task's name is a kind of goals ("human", "synthetic", or these with "-original-order"), its variation a position in
that list. Penalties for refused actions are part of the reward and never of the score.
"""

from collections.abc import Mapping
from dataclasses import replace

from empo2_jax.envs.webshop import pages, text
from empo2_jax.envs.webshop.catalogue import Catalogue
from empo2_jax.envs.webshop.goals import Goal, Goals
from empo2_jax.envs.webshop.nouns import Nouns
from empo2_jax.envs.webshop.pages import Session
from empo2_jax.envs.webshop.reward import Reward, reward
from empo2_jax.errors import EnvError
from empo2_jax.types import Observation, Task

NAME = "webshop"
MAX_SCORE = 100.0  # points


class WebShopEnvironment:
    """One shopper; all of them share the catalogue, which nothing changes."""

    def __init__(
        self,
        catalogue: Catalogue,
        goals: Mapping[str, Goals],
        nouns: Nouns,
        penalty: float = 0.0,
        readable: bool = False,
    ) -> None:
        self.goal = ""
        self.session = Session("")
        self.reward: Reward | None = None  # of the purchase
        self.wanted: Goal | None = None
        self._shop, self._goals, self._nouns = catalogue, goals, nouns
        self._penalty, self._render = penalty, pages.readable if readable else pages.text
        self._last: Observation | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        """Start with the goal at position `task.variation`; nothing is drawn, so `seed` does not matter."""
        goals = self._goals.get(task.name)
        if goals is None or not 0 <= task.variation < len(goals):
            raise EnvError(f"{task}: {known(self._goals)}")
        self.wanted = goals[task.variation]
        self.goal, self.session, self.reward = self.wanted.instruction, Session(self.wanted.instruction), None
        self._last = self._observe(0.0)
        return self._last

    def step(self, action: str) -> Observation:
        """Apply the last line of `action`. After the purchase nothing happens any more and the reward is 0."""
        last = self._running()
        if last.done:
            return replace(last, reward=0.0, resolved="", resolution="invalid")
        parsed = pages.parse(action)
        after = pages.act(self.session, parsed, self._shop) if parsed else None
        if parsed is None or after is None:
            again = self._observe(-self._penalty, resolution="invalid")
            return replace(again, text=f"{text.NOTHING_HAPPENED}\n{again.text}")
        self.session = self._settled(after)
        self._last = self._observe(MAX_SCORE * self.session.score, str(parsed))
        return self._last

    def admissible_actions(self) -> list[str]:
        """What the page offers, sorted; on the first page a search for the words of the goal stands for all."""
        last = self._running()
        if last.done:
            return []
        searches = [f"search[{self.goal[:100].lower()}]"] if self.session.page == "search" else []
        return sorted([*searches, *(f"click[{thing}]" for thing in pages.clickables(self.session, self._shop))])

    def view(self) -> list[pages.Part]:
        """The page's parts."""
        self._running()
        return pages.view(self.session, self._shop)

    def close(self) -> None:
        """Nothing to release."""

    def _running(self) -> Observation:
        if self._last is None:
            raise EnvError("webshop: reset first")
        return self._last

    def _settled(self, session: Session) -> Session:
        """The session with the reward of its purchase if there was one."""
        if session.page != "done" or self.wanted is None:
            return session
        bought, wanted = self._shop.product(session.product), self._shop.product(self.wanted.product)
        self.reward = reward(bought, tuple(session.options.values()), self.wanted, wanted, self._nouns)
        return replace(session, score=self.reward.total)

    def _observe(self, points: float, resolved: str = "", resolution: str = "exact") -> Observation:
        session, done = self.session, self.session.page == "done"
        chosen = "".join(f"{pages.SEPARATOR}chosen {group}: {value}" for group, value in session.options.items())
        page = self._render(session, self._shop)
        things = pages.clickables(session, self._shop)
        shown = page if done else f"{page}\n{text.actions_line(things, session.page == 'search')}"
        score = MAX_SCORE * session.score
        success = self.reward is not None and self.reward.total >= 1.0
        return Observation(shown, points, score, done, success, page + chosen, resolved, resolution)


def known(goals: Mapping[str, Goals]) -> str:
    """Which tasks there are, for messages."""
    return "webshop has " + ", ".join(f"{name} 0 to {len(kind) - 1}" for name, kind in goals.items())
