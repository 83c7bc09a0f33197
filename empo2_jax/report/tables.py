"""Facts and tables about the run as a whole: evaluations, warm start, cost, first and last values."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from empo2_jax.metrics import Record
from empo2_jax.report.marks import alike, comparable
from empo2_jax.report.parts import Cell, Section, Table, chart, is_number, spread, text
from empo2_jax.report.run_files import RunFiles

BEFORE_WARMSTART = "before warm start"  # label of an evaluation
INNER_PHASES = ("memory_in_rollout", "retrieval_in_rollout", "wait")  # parts of other phases


def facts(run: RunFiles) -> dict[str, str]:
    """What stands at the head of the page."""
    found = {"iterations": str(len(run.metrics))}
    if run.config:
        found |= {"seed": str(run.config.run.seed), "model": run.config.model.path}
    if run.metrics and is_number(run.metrics[-1].get("episode/score")):
        found["last training score"] = text(run.metrics[-1]["episode/score"])
    if run.forked:
        found["forked from"] = run.forked
    if played := alike(run.evaluations):
        found["panel score, first → last"] = f"{text(played[0]['score'])} → {text(played[-1]['score'])}"
    return found | {key.replace("_", " "): str(value) for key, value in run.facts.items()}


def warmstart(run: RunFiles) -> Section | None:
    """The panel before the warm start and after it, number by number, and the loss curve."""
    points = [(float(n), loss) for n, loss in enumerate(run.losses, 1)]
    curve = chart("Warm-start loss", "Nats per answer token.", {"loss": points}, "update")
    before = [line for line in run.evaluations if line["label"] == BEFORE_WARMSTART]
    tables = []
    pair = run.evaluations[run.evaluations.index(before[0]) :][:2] if before else []
    if len(alike(pair)) == 2:
        first, second = pair
        names = {"valid_actions": "share of valid actions", "score": "mean score", "success": "success rate"}
        rows = [[name, text(first[key]), text(second[key])] for key, name in names.items()]
        after = _scores(second)
        rows += [[f"score, {name}", text(score), text(after.get(name, ""))] for name, score in _scores(first).items()]
        tables.append(Table("Before and after", "", ["on the panel", "before", "after"], rows))
    if not tables and not curve:
        return None
    about = "Supervised training on transcripts of training variations, before any reinforcement learning."
    return Section("Warm start", about, [curve] if curve else [], tables)


def panel(evaluations: Sequence[Record]) -> Section:
    """Scores: a column per evaluation, at most six with the first and the last, the 95 % interval below."""
    title = "Evaluation without memory"
    if not evaluations:
        return Section(title, missing=["No evaluation is recorded yet."])
    chosen = spread(evaluations, 6)
    cells = [_scores(line) for line in chosen]
    names = list(dict.fromkeys(name for column in cells for name in column))
    rows = [[name, *(text(column.get(name, "")) for column in cells)] for name in names]
    rows.append(["mean score", *(text(line["score"]) for line in chosen)])
    rows.append(["95 % interval over variations", *(_interval(list(column.values())) for column in cells)])
    rows.append(["success rate", *(text(line["success"]) for line in chosen)])
    same = spread(comparable(evaluations), 6)
    columns = [
        f"{line['label']} @ {line['iteration']}{'' if compares else ' †'}"
        for line, compares in zip(chosen, same, strict=True)
    ]
    note = "" if all(same) else "† does not compare with the others: episodes failed, or other problems were played."
    about = "Fixed panel, fixed seeds, no tips. Columns: label @ iteration."
    return Section(title, about, tables=[Table("Panel", note, ["variation", *columns], rows)])


def _scores(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Mean score over the repeats by variation."""
    return {f"{row['task']} / {row['variation']}": fmean(row["scores"]) for row in evaluation["rows"]}


def _interval(scores: Sequence[float]) -> str:
    """Mean ± 1.96 standard errors; "" for fewer than two values."""
    if len(scores) < 2:
        return ""
    mean, error = fmean(scores), stdev(scores) / math.sqrt(len(scores))
    return f"{text(mean - 1.96 * error)} … {text(mean + 1.96 * error)}"


def time_split(metrics: Sequence[Record]) -> list[tuple[str, float, float]]:
    """(phase, seconds, share of the phases) over the run, longest first."""
    totals = _seconds(metrics)
    outer = {name: value for name, value in totals.items() if name not in ("iteration", *INNER_PHASES)}
    whole = sum(outer.values()) or 1.0
    return sorted(((name, value, value / whole) for name, value in outer.items()), key=lambda row: -row[1])


def memory_share(metrics: Sequence[Record]) -> list[tuple[str, float, float]]:
    """(part, seconds, share of the rollout's time) of what memory takes over the run; [] where it is not recorded."""
    totals = _seconds(metrics)
    if not totals.keys() >= {"rollout", "memory", "memory_in_rollout"}:
        return []
    whole = sum(totals.get(name, 0.0) for name in ("rollout", "novelty", "memory")) or 1.0
    inside, committing = totals["memory_in_rollout"], totals["memory"]
    parts = {"memory in all": inside + committing, "committing tips": committing}
    if "retrieval_in_rollout" in totals:
        finding = totals["retrieval_in_rollout"]
        parts |= {"finding tips": finding, "the policy writing tips": inside - finding}
    return [(name, value, value / whole) for name, value in parts.items()]


def _seconds(metrics: Sequence[Record]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for record in metrics:
        for key, value in record.items():
            if key.startswith("timing_s/") and is_number(value):
                phase = key.removeprefix("timing_s/")
                totals[phase] = totals.get(phase, 0.0) + value
    return totals


def cost(metrics: Sequence[Record]) -> list[Table]:
    """The time of the run by phase, and memory's part of the rollout."""
    phases, parts = time_split(metrics), memory_share(metrics)
    tables = [_shares("Time by phase", "Over the whole run.", phases)] if phases else []
    note = "Of the time of rollouts, with novelty and the commit of tips; the paper measures 19 %."
    return tables + ([_shares("Memory's part of the rollout", note, parts)] if parts else [])


def _shares(title: str, note: str, rows: Sequence[tuple[str, float, float]]) -> Table:
    cells = [[name, text(seconds), Cell(f"{100 * share:.1f} %", share=share)] for name, seconds, share in rows]
    return Table(title, note, ["phase", "seconds", "share"], cells)


def last_values(metrics: Sequence[Record]) -> Table:
    """First and last value of every metric."""
    first: Record = {}
    last: Record = {}
    for record in metrics:
        first = {**record, **first}
        last |= record
    rows = [[key, text(first[key]), text(last[key])] for key in sorted(first) if key != "iteration"]
    return Table("First and last value of each", "", ["metric", "first", "last"], rows, filtered=True)
