"""`write_report(run)`: reads the files of a run, asks every part for its section, fills the template.

The page needs no network, which it forbids itself, and no script except for filters and the episode viewer; text from a
run is never markup. What could not be read or shown is said on it.
"""

from dataclasses import dataclass, field
from pathlib import Path

from empo2_jax.metrics import write_atomically
from empo2_jax.report import curves, groups, lookups, novelty_map, tables, tip_effects, viewer
from empo2_jax.report.curves import COST, LEARNING, MEMORY, MODES, OPTIMIZATION
from empo2_jax.report.marks import marks
from empo2_jax.report.parts import Section
from empo2_jax.report.run_files import RunFiles, episode_files, read_episodes, read_run
from empo2_jax.report.template import filled
from empo2_jax.run_record import CONFIG_FILE

REPORT_FILE = "report.html"


@dataclass
class Survey:
    """What all recorded episodes say, gathered file by file: they need not fit into memory at once."""

    recorded: int = 0
    effects: tip_effects.TipEffects = field(default_factory=tip_effects.TipEffects)
    phantoms: list[groups.PhantomGroup] = field(default_factory=list)
    asked: lookups.Lookups = field(default_factory=lookups.Lookups)
    visits: novelty_map.Visits = field(default_factory=novelty_map.Visits)
    shown: dict[int, list[str]] = field(default_factory=dict)  # episodes for the viewer, by iteration
    remarks: list[str] = field(default_factory=list)  # on files that were left out


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run directory and return its path.

    Raises:
        DataError: no `metrics.jsonl`, or a log of the run cannot be read.
    """
    run = read_run(run_dir)
    found = survey(run)
    episodes = viewer.choose(found.shown)
    page = filled(
        "empo2_jax.report",
        "report.html.jinja",
        name=run_dir.resolve().name,
        facts=tables.facts(run),
        marks=[*marks(run), *found.remarks],
        sections=sections(run, found),
        last=tables.last_values(run.metrics),
        episodes_json=viewer.embed(episodes),
        episodes_shown=len(episodes),
        episodes_found=found.recorded,
        config=run.config_text,
    )
    path = run_dir / REPORT_FILE
    write_atomically(path, page)
    return path


def survey(run: RunFiles) -> Survey:
    """Go through the recorded episodes once."""
    files = episode_files(run.folder)
    wanted = set(viewer.wanted([iteration for iteration, _ in files]))
    found = Survey()
    size = run.config.rollout.group_size if run.config and not _groups_unknown(run) else None
    for iteration, episodes in read_episodes(files, found.remarks):
        found.recorded += len(episodes)
        found.effects.add(episodes)
        found.phantoms += groups.phantoms(iteration, episodes, size) if size else []
        found.asked.add(iteration, episodes)
        found.visits.add(iteration, episodes)
        if iteration in wanted:
            found.shown[iteration] = viewer.texts(iteration, episodes)
    return found


def sections(run: RunFiles, found: Survey) -> list[Section]:
    """Everything between the head and the viewer, in its order."""
    adapted = [Section(label, charts=charts) for label, charts in curves.adaptations(run.adaptations).items()]
    every = [
        tables.warmstart(run),
        tables.panel(run.evaluations),
        _curves(LEARNING, run),
        tip_effects.section(found.effects, found.recorded),
        lookups.section(found.asked, run.kept, found.effects),
        _curves(MODES, run),
        _curves(OPTIMIZATION, run),
        _curves(MEMORY, run),
        novelty_map.section(run.kept, found.visits),
        groups.section(found.phantoms, _groups_unknown(run)),
        _cost(run),
        *adapted,
    ]
    return [section for section in every if section is not None]


def _curves(title: str, run: RunFiles) -> Section:
    drawn, missing = curves.curves(title, run.metrics, run.evaluations)
    return Section(
        title, charts=drawn, missing=[f"This run has no numbers for: {', '.join(missing)}."] if missing else []
    )


def _cost(run: RunFiles) -> Section:
    section = _curves(COST, run)
    by_time = curves.score_by_time(run.metrics)
    charts = [*section.charts, *([by_time] if by_time else [])]
    return Section(COST, charts=charts, tables=tables.cost(run.metrics), missing=section.missing)


def _groups_unknown(run: RunFiles) -> str:
    """Why groups cannot be told; "" where they are recorded as a whole."""
    if run.config is None:
        return f"{CONFIG_FILE} is missing or not understood"
    if run.config.rollout.group_size > run.config.run.episodes_logged:
        return "no group is recorded as a whole (run.episodes_logged against rollout.group_size)"
    return ""
