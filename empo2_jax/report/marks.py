"""What a reader must know before believing a number: an unfinished run, other code, other panels, values left out."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from empo2_jax.config import Config
from empo2_jax.metrics import Record
from empo2_jax.report.parts import is_number
from empo2_jax.report.run_files import RunFiles


def marks(run: RunFiles) -> list[str]:
    """The remarks at the head of the page."""
    played = [*_evaluations(run.evaluations), *_adaptations(run.adaptations)]
    return [*_progress(run), *_commits(run), *played, *_numbers(run.metrics), *run.remarks]


def asked(config: Config) -> tuple[int, str]:
    """How long a run gets, and in what: iterations, or trials on the panel (Reflexion), of which that is the most."""
    trials = config.algorithm.name == "reflexion"
    return (config.reflexion.trials, "trials") if trials else (config.run.iterations, "iterations")


def unfinished(config: Config, metrics: Sequence[Record]) -> str:
    """How far a run is that has not come to its end, as "2 of 40 iterations"; "" for one that has."""
    done, (most, unit) = metrics[-1]["iteration"] if metrics else 0, asked(config)
    if done >= most or (unit == "trials" and metrics and _all_solved(metrics[-1])):
        return ""
    return f"{done} of {most} {unit}"


def _all_solved(trial: Record) -> bool:
    """Whether a trial left nothing over to be tried again; an episode that failed is left over."""
    return trial.get("episode/success_rate") == 1.0 and not trial.get("episode/invalid")


def comparable(evaluations: Sequence[Record]) -> list[bool]:
    """Which have means that compare with those of the last complete one: complete too, of the same problems."""
    played = [_problems(line) if line["complete"] else None for line in evaluations]
    last = next((problems for problems in reversed(played) if problems), None)
    return [problems is not None and problems == last for problems in played]


def alike(evaluations: Sequence[Record]) -> list[Record]:
    """The evaluations that may stand on one line: those that are `comparable`."""
    return [line for line, same in zip(evaluations, comparable(evaluations), strict=True) if same]


def _problems(evaluation: Record) -> Any:
    """Split, problems and repeats."""
    return evaluation["split"], {(row["task"], row["variation"], len(row["scores"])) for row in evaluation["rows"]}


def _progress(run: RunFiles) -> list[str]:
    if run.config is None:
        return [] if run.metrics else ["No iteration is recorded yet."]
    place = unfinished(run.config, run.metrics)
    return [f"The run is not finished: {place}. All numbers are up to there."] if place else []


def _commits(run: RunFiles) -> list[str]:
    commit, earlier = str(run.facts.get("commit", "")), str(run.facts.get("earlier_commits", ""))
    found = []
    if earlier:
        found.append(f"The run was continued by other code: {earlier}, then {commit or 'unknown'}.")
    if dirty := [name for name in (*earlier.split(", "), commit) if name.endswith("-dirty")]:
        found.append(f"The code was changed after its commit: {', '.join(dirty)}.")
    return found


def _evaluations(evaluations: Sequence[Record]) -> list[str]:
    partial, other = [], []
    for line, same in zip(evaluations, comparable(evaluations), strict=True):
        if not same:
            (other if line["complete"] else partial).append(f"{line['label']} @ {line['iteration']}")
    found = []
    if partial:
        found.append(
            f"Episodes of these evaluations failed, their means are of a part and in no chart: {', '.join(partial)}."
        )
    if other:
        found.append(
            f"These evaluations played other problems than the last one and are in no chart: {', '.join(other)}."
        )
    return found


def _adaptations(adaptations: Sequence[Record]) -> list[str]:
    partial = [f"checkpoint {line['iteration']} ({line['split']})" for line in adaptations if not line["complete"]]
    return [f"Episodes of these adaptations failed, some means are of a part: {', '.join(partial)}."] if partial else []


def _numbers(metrics: Sequence[Record]) -> list[str]:
    counts: dict[str, int] = {}
    for record in metrics:
        for key, value in record.items():
            if not is_number(value):
                counts[key] = counts.get(key, 0) + 1
    found = [f"{key} in {count} of {len(metrics)} iterations" for key, count in sorted(counts.items())]
    places = [record["iteration"] for record in metrics]
    gaps = [f"{before} → {after}" for before, after in pairwise(places) if after != before + 1]
    left_out = [f"Not finite, and left out of the charts: {', '.join(found)}."] if found else []
    return left_out + ([f"The iterations are not one after another: {', '.join(gaps)}."] if gaps else [])
