"""Reflexion (arXiv 2303.11366, algorithm 1): trials with the policy's own reflections, and no weight ever changes.

Against `empo2`: what a failure taught goes into the next prompt alone. After a failed trial the policy writes a
reflection (here by the request and in the form of EMPO²'s tips, so that the two differ by what they keep and not by
words), and the next trial of the same problem opens with the newest few. A problem that was solved is not tried again
and keeps its score. There is no retrieval, no learning mode, no advantage. Since it acts on rewards of the problems
that it is measured on, this is test-time adaptation.
"""

from dataclasses import dataclass, replace

from empo2_jax.prompts import tip_entry
from empo2_jax.types import Episode, Task


@dataclass(frozen=True)
class Chain:
    """The trials of one problem so far; a problem has `evaluation.repeats` chains, which know nothing of each other."""

    task: Task
    repeat: int = 0
    reflections: tuple[str, ...] = ()  # as they are shown, newest first
    newest: Episode | None = None  # of the valid episodes
    best: Episode | None = None  # the first one of the highest score

    @property
    def id(self) -> str:
        """Its name, and the beginning of its episodes' ids, which name their draws."""
        return f"reflexion/{self.task}/r{self.repeat}"

    @property
    def solved(self) -> bool:
        """Whether the trials are over."""
        return self.newest is not None and self.newest.success

    def after(self, episode: Episode, kept: int) -> "Chain":
        """The chain with one more trial; the newest `kept` reflections stay, and an invalid episode taught nothing."""
        if not episode.stop_reason.valid:
            return self
        entry = tip_entry(episode.tip, " ".join(episode.steps[-1].action.split()), episode.score) if episode.tip else ""
        reflections = (entry, *self.reflections)[:kept] if entry else self.reflections
        better = self.best is None or episode.score > self.best.score
        return replace(self, reflections=reflections, newest=episode, best=episode if better else self.best)
