"""One ScienceWorld episode at a time on a leased simulator, stepped leanly; a dead or hung simulator is replaced.

What goes wrong in the simulator raises `EnvError`; what the policy does wrong is an ordinary observation. Steps are
not counted here. An episode whose simulator died goes on in a new one if the replay of its actions gives the same
replies and scores; otherwise it has failed.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

from empo2_jax.envs import actions, scienceworld_text
from empo2_jax.envs.pool import Pool
from empo2_jax.envs.scienceworld_jvm import Jvm
from empo2_jax.envs.scienceworld_tasks import lookup
from empo2_jax.errors import EnvError
from empo2_jax.types import Observation, Task

NAME = "scienceworld"
FIRST_MOVE = "look around"  # what the package's own reset does: it may earn the points for where the agent begins
NOT_UNDERSTOOD = "No known action matches that input."
WRONG_FOCUS = "wrong focus"  # why an episode ended with -100 points; an exception in the simulator is an `EnvError`

Resolver = Literal["ours", "released-code"]
T = TypeVar("T")


class Sent(NamedTuple):
    """One exchange with the simulator."""

    action: str
    reply: str
    score: int  # points
    completed: bool


class Outcome(NamedTuple):
    """What came of one text: all exchanges it took, how it was resolved, and the state reached."""

    exchanges: list[Sent]
    how: actions.How
    state: str


class ScienceWorldEnvironment:
    """Leases a simulator at the first reset.

    The score of an episode starts at 0; points that a task grants for where the agent begins, which the package's reset
    already counts, come with the first step. `close` may be called from another thread while a call runs: the simulator
    is then killed, since its answer would reach the next episode.
    """

    def __init__(
        self,
        pool: Pool[Jvm],
        simplification: str = "",
        resolution: Resolver = "ours",
        task_of_goal: dict[str, str] | None = None,
    ) -> None:
        """`task_of_goal` is told the task name of every goal met, for prompts that depend on the task."""
        self.goal = ""
        self._pool = pool
        self._simplification = simplification
        self._resolution = resolution
        self._task_of_goal = {} if task_of_goal is None else task_of_goal
        self._jvm: Jvm | None = None
        self._busy = False  # a call has begun and not come back
        self._open = False
        self._templates: tuple[str, ...] = ()
        self._task = Task(NAME, "", 0)
        self._first = ""  # state after the reset
        self._sent: list[Sent] = []
        self._last: Observation | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        """Start `task`; the variation fixes everything, so `seed` is not used. The text is the room and inventory."""
        info = lookup(task.name)
        if not 0 <= task.variation < info.variations:
            raise EnvError(f"{task}: no such variation; {info.name} has 0 to {info.variations - 1}")
        self._task, self._sent, self._last, self._open = task, [], None, True
        if self._jvm is not None and not self._jvm.usable:
            self._drop()
        if self._jvm is None:
            self._lease()
        self.goal, self._templates, self._first = self._call(self._begin, replay=False)
        self._task_of_goal[self.goal] = info.name
        self._last = Observation(self._first, 0.0, 0.0, False, False, self._first)
        return self._last

    def step(self, action: str) -> Observation:
        """Resolve and apply `action`. After the end of an episode nothing happens any more and the reward is 0."""
        last = self._running()
        if last.done:
            return Observation(last.text, 0.0, last.score, True, last.success, last.state, "", "invalid")
        outcome = self._call(lambda jvm: self._apply(jvm, action))
        if not outcome.exchanges:
            self._last = Observation(NOT_UNDERSTOOD, 0.0, last.score, False, False, last.state, "", "invalid")
            return self._last
        sent = outcome.exchanges[-1]
        if scienceworld_text.crashed(sent.reply):
            self._pool.note("exceptions in the simulator")
            self._busy = True  # it is in an unknown state: not for another episode
            self._drop()
            raise EnvError(
                f"{self._task}: exception in the simulator after {sent.action!r}: {sent.reply.strip()[:200]}"
            )
        self._sent += outcome.exchanges
        score, success = float(sent.score), sent.score >= scienceworld_text.MAX_SCORE
        failed = sent.score < 0
        if failed:
            self._pool.note(WRONG_FOCUS)
        self._last = Observation(
            text=sent.reply,
            reward=score - last.score,
            score=score,
            done=sent.completed or success or failed,
            success=success,
            state=outcome.state,
            resolved=sent.action,
            resolution=outcome.how,
        )
        return self._last

    def admissible_actions(self) -> list[str]:
        """Every valid action except forbidden ones, sorted; up to thousands, about 50 ms."""
        self._running()
        return self._call(self._admissible)

    def close(self) -> None:
        """Give the simulator back to the pool; safe to call twice, at any time and from any thread."""
        self._open = False
        self._drop()

    def _running(self) -> Observation:
        if self._last is None or self._jvm is None:
            raise EnvError(f"{self._task}: step before a reset, after a close, or after the simulator failed")
        return self._last

    def _begin(self, jvm: Jvm) -> tuple[str, tuple[str, ...], str]:
        jvm.load(lookup(self._task.name).name, self._task.variation, self._simplification)
        jvm.step(FIRST_MOVE)
        return jvm.task_description(), self._templates or jvm.templates(), _state(jvm)

    def _apply(self, jvm: Jvm, text: str) -> Outcome:
        action, how = actions.resolve(text, self._templates)
        if how == "invalid":
            return Outcome([], how, "")
        if self._resolution == "released-code":
            _, nearest = actions.most_similar(action, self._admissible(jvm))
            action, how = nearest, "exact" if nearest == action else "similar"
        elif self._sent and scienceworld_text.asks(self._sent[-1].reply):
            number = actions.chosen(action, actions.options(self._sent[-1].reply))
            action, how = (number, "choice") if number else (action, how)
        exchanges = [_send(jvm, action)]
        if self._resolution == "ours" and scienceworld_text.refused(exchanges[-1].reply):
            nearest = actions.correction(action, self._admissible(jvm)) if action.split()[0] in actions.HARMLESS else ""
            how = "similar" if nearest else "invalid"
            exchanges += [_send(jvm, nearest)] if nearest else []
        if self._resolution == "ours" and scienceworld_text.asks(exchanges[-1].reply):
            number = actions.settled(action, actions.options(exchanges[-1].reply))
            exchanges += [_send(jvm, number)] if number else []
        how = "invalid" if scienceworld_text.refused(exchanges[-1].reply) else how
        return Outcome(exchanges, how, "" if scienceworld_text.crashed(exchanges[-1].reply) else _state(jvm))

    def _admissible(self, jvm: Jvm) -> list[str]:
        return [action for action in jvm.valid_actions() if action not in actions.FORBIDDEN]

    def _call(self, call: Callable[[Jvm], T], replay: bool = True) -> T:
        """`call` on the simulator; where that one is dead or late, once more on a new one after a replay."""
        try:
            return self._guarded(call)
        except EnvError as error:
            if not self._open:
                self._drop()
                raise EnvError(f"{self._task}: closed during a call") from error
            self._drop(str(error))
            first = error
        try:
            self._lease()
            if replay:
                self._guarded(self._replay)
            result = self._guarded(call)
        except EnvError as error:
            self._drop(str(error))
            self._last = None
            self._pool.note("episodes lost")
            raise EnvError(f"{self._task}: {first}; not recovered: {error}") from error
        self._pool.note("episodes recovered")
        return result

    def _guarded(self, call: Callable[[Jvm], T]) -> T:
        self._busy = True  # before the simulator is looked up: `close` may take it away at any moment
        jvm = self._jvm
        if jvm is None:
            raise EnvError("closed during a call")
        result = call(jvm)
        self._busy = False
        return result

    def _lease(self) -> None:
        """Lease a simulator; `close` may have come meanwhile, and then nobody else would give it back."""
        self._jvm = self._pool.lease()
        if not self._open:
            self._drop()
            raise EnvError(f"{self._task}: closed during a call")

    def _replay(self, jvm: Jvm) -> None:
        if _lines(self._begin(jvm)[2]) != _lines(self._first):
            raise EnvError("a new simulator begins the episode otherwise")
        for number, sent in enumerate(self._sent):
            again = _send(jvm, sent.action)
            if (_lines(again.reply), *again[2:]) != (_lines(sent.reply), *sent[2:]):
                raise EnvError(f"a new simulator answers {sent.action!r} (exchange {number}) otherwise")

    def _drop(self, failure: str = "") -> None:
        jvm, self._jvm = self._jvm, None
        if jvm is None:
            return
        if failure:
            self._pool.fail(jvm, failure)
        else:
            if self._busy:
                jvm.kill()
            self._pool.give_back(jvm)
        self._busy = False


def _send(jvm: Jvm, action: str) -> Sent:
    return Sent(action, *jvm.step(action))


def _state(jvm: Jvm) -> str:
    return f"{jvm.look().strip()}\n{jvm.inventory().strip()}"


def _lines(reply: str) -> list[str]:
    """The lines of a reply, sorted: each simulator lists things in its own order. Numbered lines stay."""
    return reply.splitlines() if scienceworld_text.asks(reply) else sorted(reply.splitlines())
