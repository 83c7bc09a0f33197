"""Charts of the numbers that an iteration leaves: which metrics stand together, and what to say of them."""

import re
from collections.abc import Sequence

from empo2_jax.metrics import Record
from empo2_jax.report.marks import alike
from empo2_jax.report.parts import Chart, chart, is_number

LEARNING, MODES, OPTIMIZATION, MEMORY, COST = "Learning", "Modes", "Optimization", "Memory and novelty", "Cost"

_OFF_ALONE = (
    ' With memory.placement = "history" there is no line on_memory: of off-policy episodes alone the trainer has '
    "log-probs without tips."
)

# Section, title, pattern of the metric names (the label is what the groups match), what the chart says.
CHARTS: tuple[tuple[str, str, str, str], ...] = (
    (LEARNING, "Score", r"(episode|val)/score", "Points; training episodes and the panel without memory."),
    (LEARNING, "Success rate", r"(episode|val)/success_rate", "Share of episodes that solved their task."),
    (LEARNING, "Reward", r"reward/(.+)", "Return without novelty and its spread; the novelty part."),
    (LEARNING, "Valid actions", r"(episode|val)/valid_actions", "Share of actions that the environment accepted."),
    (LEARNING, "Episode length", r"episode/(length)", "Actions per episode."),
    (
        LEARNING,
        "Groups",
        r"(group/.+|episode/invalid)",
        "Shares: equal returns, phantom advantages, steps in states that others began in, failed episodes.",
    ),
    (MODES, "Mode mix", r"empo2/(on|on_memory|off)/share", "How episodes act and learn; shares."),
    (MODES, "Reward by mode", r"empo2/(on|on_memory|off)/reward", "Mean return of the episodes of a mode."),
    (MODES, "Importance ratio by mode", r"empo2/(on|on_memory|off)/ratio", "Mean ratio of new to old policy."),
    (MODES, "Effective sample size", r"empo2/(on|on_memory|off)/ess", "Of these ratios, over the number of tokens."),
    (MODES, "Clipped and masked tokens", r"empo2/(.+/(?:clipfrac|masked))", "Shares of the tokens of a mode."),
    (MODES, "Entropy by mode", r"empo2/(on|on_memory|off)/entropy", "Nats per token, under the prompt in the loss."),
    (
        MODES,
        "With tips against without: KL",
        r"empo2/(off|on_memory)/kl_tips_vs_bare",
        "Mean log-prob of the sampled tokens with tips less without, nats: an estimate of KL(with ‖ without)."
        + _OFF_ALONE,
    ),
    (
        MODES,
        "With tips against without: ratio",
        r"empo2/(off|on_memory)/bare_ratio",
        "Mean of π(without tips) / π(with tips) over sampled tokens; 1 is expected, less means rare tokens carry it."
        + _OFF_ALONE,
    ),
    (
        MODES,
        "With tips against without: sample size",
        r"empo2/(off|on_memory)/bare_ess",
        "Effective share of tokens that importance sampling from with to without tips would be left with." + _OFF_ALONE,
    ),
    (OPTIMIZATION, "Entropy", r"actor/(entropy)", "Nats per token."),
    (OPTIMIZATION, "Gradient norm", r"actor/(grad_norm)", "Before clipping."),
    (OPTIMIZATION, "Policy loss", r"actor/(pg_loss)", "Mean over the updates of an iteration."),
    (
        OPTIMIZATION,
        "Engine against trainer",
        r"mismatch/(logprob_abs_diff|kl)",
        "Log-probs of the same tokens under the same weights: mean size of the difference, and its mean; nats.",
    ),
    (OPTIMIZATION, "Engine against trainer, largest", r"mismatch/(logprob_abs_diff_max)", "Of one token, nats."),
    (OPTIMIZATION, "Staleness", r"staleness/(mean|max|capped)", "Versions; share of tokens whose weight is capped."),
    (MEMORY, "Memory", r"memory/(size|evictions|duplicates)", "Tips held; dropped and met again since the start."),
    (MEMORY, "Retrieval", r"memory/(hit_rate)", "Share of steps with memory that saw a tip."),
    (MEMORY, "Utility of tips", r"memory/(utility)", "Points: members of a group with tips less others."),
    (MEMORY, "Length of tips", r"memory/(tip_tokens)", "Sampled tokens per tip; it falls where they become fragments."),
    (MEMORY, "Missing tips", r"memory/(tips_missing)", "Episodes of the iteration that wrote none."),
    (MEMORY, "Distinct states", r"novelty/(distinct_states)", "That the novelty store tells apart."),
    (MEMORY, "Novelty paid", r"novelty/(bonus_mean)", "Points per step."),
    (COST, "Time by phase", r"timing_s/(.+)", "Seconds of an iteration."),
    (COST, "Tokens", r"total/(.*tokens)", "Since the start; prompt tokens without those from the cache."),
    (
        COST,
        "Shares of the rollout",
        r"perf/(retrieval_share|memory_share|overlap)",
        "Time to find tips; with writing them; time that updates ran too.",
    ),
    (COST, "Throughput", r"perf/(.*tokens_per_s)", "Tokens per second."),
)


def curves(section: str, metrics: Sequence[Record], evaluations: Sequence[Record]) -> tuple[list[Chart], list[str]]:
    """The charts of a section that the run has numbers for, and the titles of those that it has none for."""
    panel = [
        {
            "iteration": line["iteration"],
            "val/score": line["score"],
            "val/success_rate": line["success"],
            "val/valid_actions": line["valid_actions"],
        }
        for line in alike(evaluations)
    ]
    source = [*(_without_panel(metrics) if evaluations else metrics), *panel] if section == LEARNING else metrics
    drawn, missing = [], []
    for place, title, pattern, note in CHARTS:
        if place == section:
            made = chart(title, note, series(pattern, source))
            drawn += [made] if made else []
            missing += [] if made else [title]
    return drawn, missing


def _without_panel(metrics: Sequence[Record]) -> list[Record]:
    """Metrics without the evaluations' numbers, which do not say whether they compare."""
    return [{key: value for key, value in record.items() if not key.startswith("val/")} for record in metrics]


def series(pattern: str, records: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    """(iteration, value) by what the group in `pattern` matches; where an iteration comes twice the last one counts."""
    found: dict[str, dict[float, float]] = {}
    for record in records:
        for key, value in record.items():
            match = re.fullmatch(pattern, key)
            if match and is_number(value):
                found.setdefault(match[1], {})[float(record["iteration"])] = float(value)
    return {label: sorted(points.items()) for label, points in found.items()}


def score_by_time(metrics: Sequence[Record]) -> Chart | None:
    """The training score over the minutes since the start."""
    minutes, points = 0.0, []
    for record in metrics:
        seconds, score = record.get("timing_s/iteration"), record.get("episode/score")
        if is_number(seconds):
            minutes += float(seconds) / 60
            points += [(minutes, float(score))] if is_number(score) else []
    return chart("Score against wall time", "Points; minutes since the start.", {"episode": points}, "minutes")


def adaptations(records: Sequence[Record]) -> dict[str, list[Chart]]:
    """A chart per adaptation by its label, which says what it has seen; the newest six."""
    charts: dict[str, list[Chart]] = {}
    for line in records[-6:]:
        lines = {"this trial": line["score"], "best so far": line["best_score"]}
        points = {name: [(float(n), y) for n, y in enumerate(values, 1)] for name, values in lines.items()}
        where = f"{', '.join(dict.fromkeys(row['task'] for row in line['rows']))} ({line['split']})"
        title = f"Checkpoint {line['iteration']}: {where}"
        failed = "" if line["complete"] else " Episodes failed: a trial's mean is that of the others."
        note = f"Points; weights fixed, {line['memory']} memory at the start, tips after each trial.{failed}"
        made = chart(title, note, points, "trial")
        charts.setdefault(line["label"], []).extend([made] if made else [])
    return charts
