"""The part of `empo2` for results: one run's report, runs side by side, studies."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from empo2_jax.config_options import names
from empo2_jax.errors import ConfigError


def add_commands(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """`report` and `study`; `command(commands, name, call, text)` makes a parser."""
    text = "write report.html of a run, or one page about several runs or about the results of a study"
    report = command(commands, "report", _report, text)
    report.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directory, or one results.json of a study"
    )
    report.add_argument("--out", type=Path, metavar="FILE", help="page of several runs or a study (default: runs.html)")
    study = command(commands, "study", _study, "run grids of arms and seeds and compare them")
    study.add_argument("studies", nargs="+", type=Path, metavar="STUDY", help="TOML: base, seeds, reference and arms")
    text = "one folder per study in it, with its runs, rows.jsonl, results.json and study.html (default: runs/studies)"
    study.add_argument("--out", type=Path, default=Path("runs/studies"), metavar="DIR", help=text)
    study.add_argument("--seeds", type=int, metavar="N", help="first N seeds (default: as in the file)")
    study.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at the same time (default: 2)")
    study.add_argument("--arms", metavar="A,B", help="only these arms (default: all)")
    text = "committed results: exit with 1 and name the cell unless they are reproduced within their intervals"
    study.add_argument("--check", type=Path, metavar="RESULTS", help=text)
    text = "results of this study, made elsewhere: their runs count as finished, those that are missing are run"
    study.add_argument("--continue", dest="known", type=Path, metavar="RESULTS", help=text)
    study.add_argument("--dry-run", action="store_true", help="print the runs and which are finished; run nothing")


def _report(options: argparse.Namespace) -> int:
    is_results = len(options.runs) == 1 and options.runs[0].suffix == ".json"
    if wrong := [path for path in options.runs if not is_results and not path.is_dir()]:
        raise ConfigError(f"{wrong[0]}: not a run directory; those, or one results.json of a study, are allowed")
    if is_results:
        from empo2_jax.study.page import write_page
        from empo2_jax.study.results import read_results

        print(write_page(read_results(options.runs[0]), options.out or Path("runs.html")))
        return 0
    if len(options.runs) == 1:
        if options.out:
            raise ConfigError("--out: the report of one run stands in its directory; leave out --out")
        from empo2_jax.report import write_report

        print(write_report(options.runs[0]))
        return 0
    from empo2_jax.study.comparison import compare_runs

    print(compare_runs(options.runs, options.out or Path("runs.html")))
    return 0


def _study(options: argparse.Namespace) -> int:
    from empo2_jax.study.runner import plan_lines, run_studies

    arms = names("--arms", options.arms)
    choice = {"seeds": options.seeds, "jobs": options.jobs, "arms": arms, "check": options.check}
    choice["known"] = options.known
    if options.dry_run:
        print("\n".join(plan_lines(options.studies, options.out, **choice)))
        return 0
    return 0 if run_studies(options.studies, options.out, **choice, command=["empo2", *options.arguments]) else 1
