"""What the terminal shows while a run goes on: a live line on a terminal, one plain line per iteration elsewhere."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from empo2_jax.metrics import Number
from empo2_jax.output import to_nowhere

SHOWN = (
    ("score", "episode/score", ".1f"),
    ("success", "episode/success_rate", ".2f"),
    ("reward", "reward/mean", ".2f"),
    ("tips", "memory/size", ".0f"),
    ("tok/s", "perf/tokens_per_s", ".0f"),
    ("loss", "warmstart/loss", ".3f"),
)


class Terminal(Console):
    """Standard error. A run whose reader has gone (`| head`) goes on and is silent from then on."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """Everything goes nowhere; Rich would end the program."""
        to_nowhere(sys.stderr)


class RunProgress:
    """Context manager around the loop of a run; `update` after every iteration."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None, unit: str = "iteration") -> None:
        """`total` iterations (or what `unit` says) of the run, `done` of them in earlier processes."""
        self._unit = unit
        self._console = console or Terminal()
        self._total, self._begin, self._done = total, done, done
        self._started = time.monotonic()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn(unit), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console)
            self._bar.add_task("starting", total=total, completed=done)

    def __enter__(self) -> "RunProgress":
        """Start the display."""
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the display."""
        if self._bar:
            self._bar.stop()

    def update(self, done: int, metrics: Mapping[str, Number]) -> None:
        """Show that `done` iterations are complete, with the curated metrics of the last one."""
        self._done = done
        text = f"{summary(metrics)} · {clock(self.seconds_left())} left"
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=done, description=text)
        else:
            self.note(f"{self._unit} {done}/{self._total} · {text}")

    def note(self, text: str) -> None:
        """One line above the live display."""
        note(text, self._console)

    def seconds_left(self) -> float:
        """Estimate from the mean duration of the iterations of this process; 0 before the first."""
        fresh = self._done - self._begin
        elapsed = time.monotonic() - self._started
        return elapsed / fresh * (self._total - self._done) if fresh > 0 else 0.0


class Seldom:
    """Tells of a long phase: at most one plain line every `every_s` seconds, the first after that time."""

    def __init__(self, every_s: float = 60.0) -> None:
        self._every, self._last = every_s, time.monotonic()

    def note(self, text: str) -> None:
        """Print `text`, or nothing where it is too early."""
        if time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            note(text)


def note(text: str, console: Console | None = None) -> None:
    """One plain line on the terminal, for example what a long phase is doing."""
    (console or Terminal()).print(text, markup=False, highlight=False, soft_wrap=True)


def summary(metrics: Mapping[str, Number]) -> str:
    """The curated metrics that are present, on one line."""
    return " · ".join(f"{label} {metrics[key]:{form}}" for label, key, form in SHOWN if key in metrics)


def clock(seconds: float) -> str:
    """`h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
