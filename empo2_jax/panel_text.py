"""A panel and an adaptation as tables on the terminal."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table


def print_panel(record: Mapping[str, Any]) -> None:
    """A row per variation and the means; `record` is a line of evaluations.jsonl."""
    table = Table("task", "variation", "score", "success", title=f"{record['split']}, checkpoint {record['iteration']}")
    for row in record["rows"]:
        table.add_row(row["task"], str(row["variation"]), f"{fmean(row['scores']):.1f}", f"{row['success']:.2f}")
    Console().print(table)
    numbers = {key: record[key] for key in ("score", "success", "valid_actions", "complete")}
    texts = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in numbers.items())
    print(" · ".join(texts))


def print_adaptation(record: Mapping[str, Any]) -> None:
    """A row per trial under the label; `record` is a line of adaptations.jsonl."""
    title = f"{record['label']}\n{record['split']}, checkpoint {record['iteration']}, memory {record['memory']}"
    table = Table("trial", "score", "success", "best score so far", "best success so far", title=title)
    curves = (record[key] for key in ("score", "success", "best_score", "best_success"))
    for trial, (score, success, best, solved) in enumerate(zip(*curves, strict=True), 1):
        table.add_row(str(trial), f"{score:.1f}", f"{success:.2f}", f"{best:.1f}", f"{solved:.2f}")
    Console().print(table)
    print(f"complete {record['complete']}")
