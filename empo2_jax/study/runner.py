"""`empo2 study`: what is missing is run, each run in its own process; one row per finished run; then tables and page.

Rows are kept in `rows.jsonl`; a study that was stopped, or whose runs failed, goes on where it was, and on another
machine from results that were written there. A run that fails is named and the others go on. Arms of equal
configuration are one experiment and share its runs.
A study's folder belongs to one process at a time and to one study file.
"""

import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from empo2_jax.checkpoint_files import check_writable
from empo2_jax.config_options import at_least
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.interrupts import stopped_by_sigterm
from empo2_jax.metrics import JsonLines, Record, read_jsonl, write_atomically
from empo2_jax.readers import read_text
from empo2_jax.run_record import RunLock
from empo2_jax.study.base import Cell, Study, cells_of, load_study
from empo2_jax.study.page import PAGE_FILE, write_page
from empo2_jax.study.results import (
    LEAST_SEEDS,
    RESULTS_FILE,
    Results,
    check_comparable,
    collect,
    differences,
    read_results,
    write_results,
)
from empo2_jax.study.rows import KeptRow, checked
from empo2_jax.study.runs import Processes, adapt_command, run_cell, share_cores, train_command
from empo2_jax.study.tables import print_results

ROWS_FILE, SOURCE_FILE = "rows.jsonl", "study.path"  # the latter names the study file that a folder belongs to


def run_studies(
    paths: Sequence[Path],
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 2,
    arms: tuple[str, ...] = (),
    check: Path | None = None,
    known: Path | None = None,
    command: Sequence[str] = (),
) -> bool:
    """Run what is missing of every study into `out/<study>`, print the tables, write results and page.

    Args:
        paths: Study files.
        out: Folder of the studies.
        seeds: The first so many; None as in the files.
        jobs: Runs at the same time.
        arms: Only these; none: all.
        check: Committed results that the (only) study has to reproduce.
        known: Results of the (only) study made elsewhere: runs of the same configuration count as finished.
        command: The command line, for the results.

    Returns:
        With `check`, whether they are reproduced; else whether in every study the interval of the first arm's paired
        difference from the reference lies above 0.

    Raises:
        ConfigError: an argument that cannot work; nothing was run.
        CheckpointError: a folder cannot be written, or another process is using it; nothing was run.
        DataError: some runs failed; everything else was run and written.
        Stopped: by SIGTERM, as by Ctrl-C: the runs were asked to stop and have saved what was complete.
    """
    studies, grids, committed, rows = _checked(paths, seeds, jobs, arms, check, known)
    good, failed = True, []
    with ExitStack() as stack:
        for study in studies:
            _claim(study, out / study.name, stack)
        for study, cells in zip(studies, grids, strict=True):
            with stopped_by_sigterm(f"study {study.name}: stopped"):
                results = _run(study, cells, rows, out / study.name, jobs, shlex.join(command))
            print_results(results)
            good &= results.better if committed is None else _reproduced(committed, results, arms)
            failed += [f"study {study.name}: {reason}" for reason in results.failed]
    if failed:
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        raise DataError(f"{'; '.join(failed[:3])}{more}; the same command runs what is missing")
    return good


def plan_lines(
    paths: Sequence[Path],
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 2,
    arms: tuple[str, ...] = (),
    check: Path | None = None,
    known: Path | None = None,
) -> list[str]:
    """What `run_studies` would run, without touching `out`; it refuses what that would, except a folder in use."""
    lines = []
    studies, grids, _, rows = _checked(paths, seeds, jobs, arms, check, known)
    for study, cells in zip(studies, grids, strict=True):
        check_writable(out / study.name)
        _check_owner(study, out / study.name)
        done = _finished(cells, out / study.name / ROWS_FILE, rows)
        lines.append(f"study {study.name}: {len(cells)} runs, {len(done)} finished; {study.tested} − {study.reference}")
        first: dict[str, Cell] = {}
        for cell in cells:
            state, folder = "to run", _folder(out / study.name, cell)
            if (cell.arm.name, cell.seed) in done:
                state = "finished"
            elif (same := first.setdefault(cell.fingerprint(), cell)) != cell:
                lines.append(f"  the run of {same}: {cell}")
                continue
            adapt = f"; then empo2 {shlex.join(adapt_command(cell, folder))}" if cell.trials else ""
            lines.append(f"  {state}: empo2 {shlex.join(train_command(cell, folder))}{adapt}")
    return lines


def _checked(
    paths: Sequence[Path],
    seeds: int | None,
    jobs: int,
    arms: tuple[str, ...],
    check: Path | None,
    known: Path | None,
) -> tuple[list[Study], list[list[Cell]], Results | None, list[Record]]:
    """The studies, their runs, the results to be reproduced and the rows to go on from; both are of the only study."""
    at_least("--jobs", jobs, 1)
    for option, path in (("--check", check), ("--continue", known)):
        if path and len(paths) > 1:
            raise ConfigError(f"{option} {path}: one study is allowed, not {len(paths)}")
    if check and known:
        raise ConfigError(f"--check {check} with --continue {known}: a check is of runs made here; one is allowed")
    studies = _load(paths)
    grids = [cells_of(study, seeds, arms) for study in studies]
    committed = read_results(check) if check else None
    if committed and (count := len({cell.seed for cell in grids[0]})) < LEAST_SEEDS:
        raise ConfigError(f"--check needs at least {LEAST_SEEDS} seeds, not {count}: fewer have no interval")
    if committed:
        check_comparable(committed, grids[0], f"--check {check}")
    return studies, grids, committed, _known_rows(known, grids[0]) if known else []


def _known_rows(path: Path, cells: Sequence[Cell]) -> list[Record]:
    """Rows of a results file that are runs of these cells."""
    wanted, results = {cell.fingerprint() for cell in cells}, read_results(path)
    rows: dict[str, Record] = {}
    for row in results.rows:
        name = results.fingerprint_today(row)
        if rows.setdefault(name, row)["score"] != row["score"]:
            first = rows[name]
            raise DataError(
                f"{path}: arm {first['arm']} and arm {row['arm']}, seed {row['seed']}, are one configuration and have "
                f"scores of {first['score']} and {row['score']}; equal ones are allowed"
            )
    if not rows.keys() & wanted:
        raise ConfigError(f"--continue {path}: none of its runs has a configuration and seed that is to be run here")
    return [row | {"fingerprint": name} for name, row in rows.items() if name in wanted]


def _load(paths: Sequence[Path]) -> list[Study]:
    """The studies, no two of which would have one folder."""
    studies: dict[str, Study] = {}
    for study in map(load_study, paths):
        if study.name in studies:
            raise ConfigError(
                f"{studies[study.name].path} and {study.path}: both are study {study.name!r}, and a folder holds one; "
                "another file name is allowed"
            )
        studies[study.name] = study
    return list(studies.values())


def _claim(study: Study, folder: Path, stack: ExitStack) -> None:
    """Lock the folder for this study."""
    stack.enter_context(RunLock(folder))
    _check_owner(study, folder)
    write_atomically(folder / SOURCE_FILE, f"{study.path.resolve()}\n")


def _check_owner(study: Study, folder: Path) -> None:
    """Refuse the folder of another study. One whose file is gone may be gone on with by another file of that name."""
    source = folder / SOURCE_FILE
    owner = Path(read_text(source).strip()) if source.is_file() else study.path
    if owner.is_file() and not owner.samefile(study.path):
        raise ConfigError(f"{folder}: belongs to the study {owner}, not to {study.path}; use another --out")


def _run(study: Study, cells: Sequence[Cell], known: Sequence[Record], out: Path, jobs: int, command: str) -> Results:
    log = JsonLines(out / ROWS_FILE)
    kept = {row["fingerprint"] for row in _kept(out / ROWS_FILE)}
    for row in known:
        if row["fingerprint"] not in kept:
            log.append(row)
    rows = _finished(cells, out / ROWS_FILE)
    missing: dict[str, list[Cell]] = {}  # cells that share a run, by its fingerprint
    for cell in cells:
        if (cell.arm.name, cell.seed) not in rows:
            missing.setdefault(cell.fingerprint(), []).append(cell)
    failed: list[str] = []
    console = Console()
    jobs = max(min(jobs, len(missing)), 1)
    threads, processes = ThreadPoolExecutor(jobs, initializer=share_cores(jobs)), Processes()
    try:
        futures = {
            threads.submit(run_cell, alike[0], _folder(out, alike[0]), processes): alike for alike in missing.values()
        }
        for future in as_completed(futures):
            cell, *others = futures[future]
            try:
                row = future.result()
            except DataError as error:
                failed += [str(error), *(f"{other}: would be the same run as {cell}" for other in others)]
                console.print(f"{len(rows)}/{len(cells)} {error}", style="red", markup=False, soft_wrap=True)
                continue
            log.append(row)
            rows |= {(alike.arm.name, alike.seed): _as(alike, row) for alike in (cell, *others)}
            console.print(f"{len(rows)}/{len(cells)} {cell}: {row['score']:.1f} ({row['seconds']:.0f} s)", markup=False)
    finally:
        processes.stop()  # after Ctrl-C, SIGTERM or an error; otherwise none is left
        threads.shutdown(cancel_futures=True)
        log.close()
    ordered = [rows[cell.arm.name, cell.seed] for cell in cells if (cell.arm.name, cell.seed) in rows]
    results = collect(study, cells, ordered, failed, command)
    write_results(out / RESULTS_FILE, results)
    if ordered:
        write_page(results, out / PAGE_FILE)
        console.print(f"page: {out / PAGE_FILE}", markup=False, soft_wrap=True)
    return results


def _folder(out: Path, cell: Cell) -> Path:
    return out / cell.arm.name / f"seed{cell.seed}"


def _finished(cells: Sequence[Cell], file: Path, known: Sequence[Record] = ()) -> dict[tuple[str, int], Record]:
    """Rows of these very runs, whatever arm they were made for; those of other configurations are left out."""
    made = {row["fingerprint"]: row for row in (*known, *_kept(file))}
    return {(cell.arm.name, cell.seed): _as(cell, made[name]) for cell in cells if (name := cell.fingerprint()) in made}


def _kept(file: Path) -> list[Record]:
    lines = read_jsonl(file) if file.is_file() else []
    return [checked(KeptRow, line, f"{file}: line {number}") for number, line in enumerate(lines, 1)]


def _as(cell: Cell, row: Record) -> Record:
    """The row under the cell's name."""
    return row | {"arm": cell.arm.name, "seed": cell.seed}


def _reproduced(committed: Results, fresh: Results, arms: Sequence[str]) -> bool:
    """Print and return whether the committed results are reproduced; `arms` are those of a limited study."""
    left_out = [name for name in committed.names if arms and name not in arms]
    found = differences(committed, fresh, left_out)
    equal = sum(
        row["tasks"] == other["tasks"]
        for arm in fresh.names
        for row in fresh.of(arm)
        for other in committed.of(arm)
        if other["seed"] == row["seed"]
    )
    console = Console()
    console.print(f"check: {equal} of {len(fresh.rows)} runs have exactly the committed scores")
    lines = [f"check: --arms leaves out, and nothing was checked of: {', '.join(left_out)}"] if left_out else []
    for line in lines + (found or ["check: reproduced, every checked arm within its committed interval"]):
        console.print(line, markup=False, soft_wrap=True)
    return not found
