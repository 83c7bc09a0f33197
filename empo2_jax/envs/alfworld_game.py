"""One ALFWorld game in TextWorld's PDDL engine: its texts cleaned, its things named as ALFWorld names them.

The engine translates a game for its planner in Python (seconds), with output and arguments of the whole process
redirected: one game at a time begins, and translations are kept for the episodes that follow.

It keeps the state of a game in global variables of a shared library, so that every engine loads a copy of its own. All
copies register functions in a table of the first (the loader keeps one symbol of its name per process), and the end of
the process calls them. So a copy must never be unloaded: engines are kept for the next game, and there are as many as
games were open at once.
"""

import functools
import importlib
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from empo2_jax.envs.alfworld_data import GameData
from empo2_jax.envs.text_game import NOTHING, Said
from empo2_jax.envs.textworld import package
from empo2_jax.errors import EnvError

MAX_SCORE = 100.0
KEPT = 64  # translations, two per game, 3 MB each where a kitchen has 47 places

_BEGINNING = threading.Lock()
_IDLE: list[Any] = []  # engines of this process that play nothing now; never ended, see above
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, StopIteration)
_FAULTS += (SyntaxError, SystemExit, TypeError, ValueError)
_BANNER = re.compile(r"^-=.*=-$", re.MULTILINE)
_GOAL = re.compile(r"^Your task is to: *(.+?)\.?$", re.MULTILINE)
_BLANK = re.compile(r"\[?\{[^{}]*\}\]?")  # where the form of a command has a thing
_ADJECTIVES = {"isclean": "clean", "iscool": "cool", "ishot": "hot", "issliced": "sliced", "istoggled": "switched on"}


class AlfWorldGame:
    """A game that has begun; a success is worth `MAX_SCORE`, everything else nothing."""

    def __init__(self, data: GameData) -> None:
        """Begin it; raises `EnvError` where the engine cannot make a game of the data."""
        self._engine = _engine()
        try:
            with _BEGINNING, _translator(), _failures("play the game"):
                self._state = _begun(self._engine, data)
                self._forms = _forms(self._engine)
            self.goal, self._room = _read(self._state["feedback"])
        except EnvError:
            self.close()
            raise

    def opening(self) -> str:
        """The room, and the forms of all commands."""
        return f"{self._room}\nActions: {', '.join(self._forms)}."

    def view(self) -> str:
        """Where the player stands, what is seen there and what is carried."""
        return view((fact.name, *(argument.name for argument in fact.arguments)) for fact in self._state["facts"])

    def commands(self) -> list[str]:
        """What the game accepts now, sorted."""
        return sorted(self._state["admissible_commands"])

    def send(self, command: str) -> Said:
        """Apply a command; the game takes those of `commands` as they stand and no others."""
        if command not in self._state["admissible_commands"]:
            return Said(NOTHING, 0.0, False, False, "invalid")
        with _failures(f"go on after {command!r}"):
            self._state, _, _ = self._engine.step(command)
        won = bool(self._state["won"])
        return Said(" ".join(self._state["feedback"].split()), MAX_SCORE * won, won, won, "exact")

    def close(self) -> None:
        """Keep the engine for the next game."""
        _IDLE.append(self._engine)


def form(template: str) -> str:
    """A command's template with X, Y and Z for things: "take {o} from {r}" is "take X from Y"."""
    letters = iter("XYZ")
    return _BLANK.sub(lambda _: next(letters), template)


def names(identifiers: Iterable[str]) -> dict[str, str]:
    """What ALFWorld calls things: kind and number, where the first of a kind in alphabetical order has the last number.

    An identifier is `<kind>_bar_<place>`; a basin also has "basin" somewhere behind. Others keep their identifier.
    """
    kinds = {identifier: _kind(identifier) for identifier in sorted(set(identifiers))}
    left = Counter(kinds.values())
    named = {}
    for identifier, kind in kinds.items():
        named[identifier] = f"{kind} {left[kind]}" if "_bar_" in identifier else identifier
        left[kind] -= 1
    return named


def view(facts: Iterable[tuple[str, ...]]) -> str:
    """Place and hands as text, from facts (predicate, then names of things); closed things hide what is in them."""
    by_name: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for name, *arguments in facts:
        by_name[name].append(tuple(arguments))
    here = {place for _, place in by_name["atlocation"]}
    stands = sorted(thing for thing, place in by_name["receptacleatlocation"] if place in here)
    seen = [_inside(thing, by_name) for thing in stands]
    held = sorted(_described(thing, by_name) for _, thing in by_name["holds"])
    place = f"You are at {'; '.join(seen)}." if seen else "You are in the middle of the room."
    return f"{place}\nYou carry {', '.join(held) or 'nothing'}."


def _read(introduction: str) -> tuple[str, str]:
    """Goal and room."""
    goal = _GOAL.search(introduction)
    if goal is None:
        raise EnvError("the game does not say what the task is")
    return goal[1], " ".join(_GOAL.sub("", _BANNER.sub("", introduction)).split())


def _inside(thing: str, by_name: dict[str, list[tuple[str, ...]]]) -> str:
    if (thing,) in by_name["openable"] and (thing,) not in by_name["opened"]:
        return f"{thing}, which is closed"
    things = sorted(_described(inner, by_name) for inner, outer in by_name["inreceptacle"] if outer == thing)
    return f"{thing} with {', '.join(things) or 'nothing'}"


def _described(thing: str, by_name: dict[str, list[tuple[str, ...]]]) -> str:
    words = [word for name, word in _ADJECTIVES.items() if (thing,) in by_name[name]]
    return f"{thing} ({', '.join(words)})" if words else thing


def _kind(identifier: str) -> str:
    return identifier.partition("_bar_")[0] + ("basin" if "basin" in identifier else "")


@functools.cache
def planner() -> Any:
    """The planner's package, made to keep what it translates: the engine asks for the same four times per episode.

    Raises:
        EnvError: it or TextWorld is not installed, or does not work with this Python.
    """
    if sys.version_info >= (3, 13):  # it evaluates expressions in the variables of a running function
        raise EnvError("textworld's PDDL engine needs Python 3.11 or 3.12")
    try:
        planner: Any = importlib.import_module("fast_downward")
        with _translator():
            importlib.import_module("fast_downward.translate.pddl_parser.lisp_parser")
    except ImportError as error:
        raise EnvError(f"fast-downward-textworld is not installed ({error}); install empo2_jax[alfworld]") from error
    package()
    planner.pddl2sas = functools.lru_cache(KEPT)(planner.pddl2sas)
    return planner


def _engine() -> Any:
    """An engine that plays nothing: one that did before, else a new one."""
    planner()
    try:
        return _IDLE.pop()
    except IndexError:
        textworld = package()
        return textworld.envs.PddlEnv(textworld.EnvInfos(facts=True))


def _begun(engine: Any, data: GameData) -> Any:
    engine.load(dict(data.texts))
    named = names(information.id for information in engine._entity_infos.values())
    for information in engine._entity_infos.values():
        information.name = named[information.id]
    return engine.reset()


def _forms(engine: Any) -> list[str]:
    """Forms of the commands that the domain has an action for: grammars also have texts for actions it lacks."""
    known = {action.name for action in engine._pddl_state.task.actions}
    return sorted({form(action.template) for name, action in engine._logic.actions.items() if name in known})


@contextmanager
def _translator() -> Generator[None, None, None]:
    """The arguments that the planner's translator reads when imported, and sets itself when called."""
    arguments, sys.argv = sys.argv, ["translate.py", "domain", "task"]
    try:
        yield
    finally:
        sys.argv = arguments


@contextmanager
def _failures(what: str) -> Generator[None, None, None]:
    """What the engine raises about a game as `EnvError`: its readers' complaints, and those of a grammar's Python."""
    try:
        yield
    except (*_complaints(), *_FAULTS) as error:
        said = " ".join(str(error).split())
        raise EnvError(f"TextWorld's engine cannot {what}: {type(error).__name__}: {said}") from error


@functools.cache
def _complaints() -> tuple[type[Exception], ...]:
    return (
        importlib.import_module("fast_downward.translate.pddl_parser.lisp_parser").ParseError,
        importlib.import_module("tatsu.exceptions").ParseException,
        importlib.import_module("textworld.envs.pddl.textgen").CSGUnknownSymbolError,
    )
