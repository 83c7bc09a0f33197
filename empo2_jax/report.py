"""`report.html`: one self-contained page about one run, made from the files in its directory and nothing else.

Reads `metrics.jsonl` and, where they exist, `config.toml`, `run.json` (command, versions), `start/losses.json`,
`evaluations.jsonl`, `adaptations.jsonl` and `episodes/*.jsonl`. The page needs no network; text from a run is never
markup.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

import jinja2

from empo2_jax.charts import line_chart, number_text
from empo2_jax.errors import DataError
from empo2_jax.metrics import (
    ADAPTATIONS_FILE,
    EPISODES_FOLDER,
    EVALUATIONS_FILE,
    Record,
    read_jsonl,
    read_metrics,
    write_atomically,
)
from empo2_jax.run_record import CONFIG_FILE, FACTS_FILE, origin

REPORT_FILE = "report.html"
LOSSES_FILE = "start/losses.json"  # of the warm start
BEFORE_WARMSTART = "before warm start"  # label of an evaluation
T = TypeVar("T")

EPISODE_BYTES = 8_000_000  # of episodes embedded in the page; the rest stays in the run directory

# Section, title, pattern of the metric names (the label is what the groups match), what the chart says.
CHARTS: tuple[tuple[str, str, str, str], ...] = (
    ("Learning", "Score", r"(episode|val)/score", "Points; training episodes and the panel without memory."),
    ("Learning", "Success rate", r"(episode|val)/success_rate", "Share of episodes that solved their task."),
    ("Learning", "Reward", r"reward/(.+)", "Return without novelty and its spread; the novelty part."),
    ("Learning", "Valid actions", r"(episode|val)/valid_actions", "Share of actions that the environment accepted."),
    ("Learning", "Episode length", r"episode/(length)", "Actions per episode."),
    (
        "Learning",
        "Groups",
        r"(group/.+|episode/invalid)",
        "Shares: equal returns, phantom advantages, steps in states that others began in, failed episodes.",
    ),
    ("Modes", "Mode mix", r"empo2/(on|on_memory|off)/share", "How episodes act and learn; shares."),
    ("Modes", "Reward by mode", r"empo2/(on|on_memory|off)/reward", "Mean return of the episodes of a mode."),
    ("Modes", "Importance ratio by mode", r"empo2/(on|on_memory|off)/ratio", "Mean ratio of new to old policy."),
    ("Modes", "Clipped and masked tokens", r"empo2/(.+/(?:clipfrac|masked))", "Shares of the tokens of a mode."),
    ("Modes", "Effective sample size", r"empo2/(on|on_memory|off)/ess", "Relative to the number of tokens."),
    (
        "Modes",
        "What tips change",
        r"empo2/((?:off|on_memory)/kl_tips_vs_bare)",
        "Log-probability with tips less without, nats.",
    ),
    ("Optimization", "Entropy", r"actor/(entropy)", "Nats per token."),
    ("Optimization", "Gradient norm", r"actor/(grad_norm)", "Before clipping."),
    ("Optimization", "Policy loss", r"actor/(pg_loss)", "Mean over the updates of an iteration."),
    ("Optimization", "Engine against trainer", r"mismatch/(.+)", "Differences of log-probabilities, nats."),
    ("Optimization", "Staleness", r"staleness/(mean|max|capped)", "Versions; share of tokens whose weight is capped."),
    ("Memory and novelty", "Memory", r"memory/(size|evictions)", "Tips held; tips dropped since the start."),
    ("Memory and novelty", "Retrieval", r"memory/(hit_rate)", "Share of steps with memory that saw a tip."),
    ("Memory and novelty", "Utility of tips", r"memory/(utility)", "Points: members of a group with tips less others."),
    ("Memory and novelty", "Distinct states", r"novelty/(distinct_states)", "That the novelty store tells apart."),
    ("Cost", "Time by phase", r"timing_s/(.+)", "Seconds of an iteration."),
    ("Cost", "Tokens", r"total/(.*tokens)", "Since the start; prompt tokens without those from the cache."),
    (
        "Cost",
        "Shares of the rollout",
        r"perf/(retrieval_share|memory_share|overlap)",
        "Time to find tips; with writing them; time that updates ran too.",
    ),
    ("Cost", "Throughput", r"perf/(.*tokens_per_s)", "Tokens per second."),
)
INNER_PHASES = ("memory_in_rollout", "retrieval_in_rollout", "wait")  # parts of other phases


@dataclass(frozen=True)
class Chart:
    """A picture and the numbers behind it."""

    section: str
    title: str
    note: str
    svg: str
    columns: list[str]
    rows: list[list[str]]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run directory and return its path.

    Raises:
        DataError: no `metrics.jsonl`, or a file of the run cannot be read.
    """
    metrics = read_metrics(run_dir)
    evaluations = _optional_lines(run_dir / EVALUATIONS_FILE)
    charts = _charts(metrics, evaluations) + _adaptations(_optional_lines(run_dir / ADAPTATIONS_FILE))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("empo2_jax", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _cell
    episodes, found = _episodes(run_dir)
    page = environment.get_template("report.html.jinja").render(
        name=run_dir.resolve().name,
        facts=_facts(run_dir, metrics, evaluations),
        warmstart=_warmstart(run_dir, evaluations),
        panel=_panel(evaluations),
        sections=list(dict.fromkeys(chart.section for chart in charts)),
        charts=charts,
        times=_time_split(metrics),
        last=_last_values(metrics),
        episodes_json=embed_json(episodes),
        episodes_shown=len(episodes),
        episodes_found=found,
        config=_optional_text(run_dir / CONFIG_FILE),
    )
    path = run_dir / REPORT_FILE
    write_atomically(path, page)
    return path


def embed_json(value: Any) -> str:
    """JSON that is safe inside a script element: no `<`, `>`, `&` or line separator stands in it as such."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _charts(metrics: Sequence[Record], evaluations: Sequence[Record]) -> list[Chart]:
    panel = [
        {
            "iteration": line["iteration"],
            "val/score": line["score"],
            "val/success_rate": line["success"],
            "val/valid_actions": line["valid_actions"],
        }
        for line in evaluations
    ]
    charts = []
    for section, title, pattern, note in CHARTS:
        source = [*metrics, *panel] if section == "Learning" else metrics
        chart = _chart(section, title, note, _series(pattern, source), "iteration")
        charts += [chart] if chart else []
    by_time = _score_by_time(metrics)
    cost = _chart(
        "Cost", "Score against wall time", "Points; minutes since the start.", {"episode": by_time}, "minutes"
    )
    return [*charts, cost] if cost else charts


def _adaptations(records: Sequence[Record]) -> list[Chart]:
    """A chart per adaptation in the section that its label names; the newest six."""
    charts = []
    for line in records[-6:]:
        curves = {"this trial": line["score"], "best so far": line["best_score"]}
        series = {name: [(float(n), y) for n, y in enumerate(values, 1)] for name, values in curves.items()}
        where = f"{', '.join(dict.fromkeys(row['task'] for row in line['rows']))} ({line['split']})"
        title = f"Checkpoint {line['iteration']}: {where}"
        note = f"Points; weights fixed, {line['memory']} memory at the start, tips after each trial."
        chart = _chart(line["label"], title, note, series, "trial")
        charts += [chart] if chart else []
    return charts


def _series(pattern: str, records: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    series: dict[str, dict[float, float]] = {}
    for record in records:
        for key, value in record.items():
            match = re.fullmatch(pattern, key)
            if match and isinstance(value, int | float):
                series.setdefault(match[1], {})[float(record["iteration"])] = float(value)
    return {label: sorted(points.items()) for label, points in series.items()}


def _chart(
    section: str, title: str, note: str, series: Mapping[str, Sequence[tuple[float, float]]], x_label: str
) -> Chart | None:
    svg = line_chart(title, series, x_label)
    if not svg:
        return None
    values = {label: dict(points) for label, points in series.items()}
    places = sorted({x for points in values.values() for x in points})
    rows = [[_cell(x), *(_cell(points.get(x, "")) for points in values.values())] for x in places]
    return Chart(section, title, note, svg, [x_label, *values], rows)


def _score_by_time(metrics: Sequence[Record]) -> list[tuple[float, float]]:
    minutes, points = 0.0, []
    for record in metrics:
        seconds = record.get("timing_s/iteration")
        if isinstance(seconds, int | float) and isinstance(record.get("episode/score"), int | float):
            minutes += seconds / 60
            points.append((minutes, float(record["episode/score"])))
    return points


def _time_split(metrics: Sequence[Record]) -> list[tuple[str, float, float]]:
    """(phase, seconds, share of the phases) over the run, longest first."""
    totals: dict[str, float] = {}
    for record in metrics:
        for key, value in record.items():
            phase = key.removeprefix("timing_s/")
            if phase not in (key, "iteration", *INNER_PHASES) and _is_number(value):
                totals[phase] = totals.get(phase, 0.0) + value
    whole = sum(totals.values()) or 1.0
    return sorted(((name, value, value / whole) for name, value in totals.items()), key=lambda row: -row[1])


def _facts(run_dir: Path, metrics: Sequence[Record], evaluations: Sequence[Record]) -> dict[str, str]:
    facts = {"iterations": str(len(metrics))}
    config = _optional_text(run_dir / CONFIG_FILE)
    for key in ("seed", "path"):
        match = re.search(rf"^{key} = (.+)$", config, re.MULTILINE)
        if match:
            facts["model" if key == "path" else key] = match[1].strip('"')
    if metrics and isinstance(metrics[-1].get("episode/score"), int | float):
        facts["last training score"] = _cell(metrics[-1]["episode/score"])
    if forked := origin(run_dir):
        facts["forked from"] = forked
    if evaluations:
        facts["panel score, first → last"] = f"{_cell(evaluations[0]['score'])} → {_cell(evaluations[-1]['score'])}"
    return facts | {str(key): str(value) for key, value in _optional_json(run_dir / FACTS_FILE, {}).items()}


def _warmstart(run_dir: Path, evaluations: Sequence[Record]) -> dict[str, Any] | None:
    """The panel before the warm start and after it, number by number, and the loss curve."""
    losses = _optional_json(run_dir / LOSSES_FILE, [])
    curve = _chart(
        "", "Warm-start loss", "", {"loss": [(float(n), loss) for n, loss in enumerate(losses, 1)]}, "update"
    )
    before = [line for line in evaluations if line["label"] == BEFORE_WARMSTART]
    rows: list[tuple[str, Any, Any]] = []
    if before and len(evaluations) > 1:
        first, second = before[0], evaluations[evaluations.index(before[0]) + 1]
        names = {"valid_actions": "share of valid actions", "score": "mean score", "success": "success rate"}
        rows = [(name, first[key], second[key]) for key, name in names.items()]
        after = _scores(second)
        rows += [(f"score, {name}", score, after.get(name, "")) for name, score in _scores(first).items()]
    return {"rows": rows, "curve": curve} if rows or curve else None


def _panel(evaluations: Sequence[Record]) -> dict[str, Any] | None:
    """Panel scores: a column per evaluation, at most six with the first and the last, the 95 % interval below."""
    if not evaluations:
        return None
    chosen = _spread(evaluations, 6)
    tables = [_scores(line) for line in chosen]
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = [(name, [table.get(name, "") for table in tables]) for name in names]
    rows.append(("mean score", [line["score"] for line in chosen]))
    rows.append(("95 % interval over variations", [_interval(list(table.values())) for table in tables]))
    rows.append(("success rate", [line["success"] for line in chosen]))
    return {"columns": [f"{line['label']} @ {line['iteration']}" for line in chosen], "rows": rows}


def _scores(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Mean score over the repeats by variation."""
    return {f"{row['task']} / {row['variation']}": fmean(row["scores"]) for row in evaluation["rows"]}


def _interval(scores: Sequence[float]) -> str:
    """Mean ± 1.96 standard errors; "" for fewer than two values."""
    if len(scores) < 2:
        return ""
    mean, error = fmean(scores), stdev(scores) / math.sqrt(len(scores))
    return f"{_cell(mean - 1.96 * error)} … {_cell(mean + 1.96 * error)}"


def _last_values(metrics: Sequence[Record]) -> list[tuple[str, Any, Any]]:
    """(metric, first value, last value) of every metric."""
    first: Record = {}
    last: Record = {}
    for record in metrics:
        first = {**record, **first}
        last |= record
    return [(key, first[key], last[key]) for key in sorted(first) if key != "iteration"]


def _episodes(run_dir: Path) -> tuple[list[Record], int]:
    """Episodes for the viewer within `EPISODE_BYTES`, iterations spread evenly, and how many files' lines there are."""
    files = sorted((run_dir / EPISODES_FOLDER).glob("*.jsonl"), key=lambda path: (len(path.name), path.name))
    by_iteration = {path.stem: read_jsonl(path) for path in files}
    shown, used = [], 0
    for rank in range(max(map(len, by_iteration.values()), default=0)):
        for iteration in _spread(list(by_iteration), 40):
            if rank < len(by_iteration[iteration]):
                record = {"iteration": int(iteration), **by_iteration[iteration][rank]}
                used += len(json.dumps(record))
                if used > EPISODE_BYTES:
                    return _ordered(shown), sum(map(len, by_iteration.values()))
                shown.append(record)
    return _ordered(shown), sum(map(len, by_iteration.values()))


def _ordered(episodes: list[Record]) -> list[Record]:
    return sorted(episodes, key=lambda record: record["iteration"])


def _spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` items, evenly spread, first and last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def _cell(value: Any) -> str:
    return number_text(float(value)) if _is_number(value) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _optional_lines(path: Path) -> list[Record]:
    return read_jsonl(path) if path.exists() else []


def _optional_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _optional_json(path: Path, default: T) -> T:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else default
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, type(default)):
        raise DataError(f"{path}: a JSON {'object' if isinstance(default, dict) else 'list'} is expected")
    return content
