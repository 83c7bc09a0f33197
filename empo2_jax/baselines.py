"""What `empo2 train` does for the algorithms that never update the policy: Reflexion and Retrospex.

A run directory is that of training as far as there is something to write: configuration, metrics (a line per trial or
round), episodes, report. Every finished trial or round is a file, and a run that was killed goes on after the last one.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean

from empo2_jax import assembly, distributed, warmstart
from empo2_jax.adaptation import Trial, record
from empo2_jax.algorithms.base import spent
from empo2_jax.algorithms.imitation import recorded, solved
from empo2_jax.algorithms.reflexion import Chain
from empo2_jax.algorithms.retrospex import Embed, Rescorer, transitions
from empo2_jax.config import Config
from empo2_jax.config_file import load_config
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.envs.problems import panel_tasks
from empo2_jax.errors import CheckpointError, ConfigError, DataError
from empo2_jax.evaluation import Panel, evaluate, refuse_total_failure, summarize
from empo2_jax.learner.critic import CRITIC_FILE, train_critic
from empo2_jax.metrics import ADAPTATIONS_FILE, EPISODES_FOLDER, Stopwatch, read_metrics, write_atomically
from empo2_jax.progress import RunProgress, note
from empo2_jax.report import write_report
from empo2_jax.rollout.collect import Assignment, Collector
from empo2_jax.rollout.reflect import AfterFailure, TipWriter
from empo2_jax.rollout.rescore import Chooser
from empo2_jax.rollout.spread import from_bytes, to_bytes
from empo2_jax.run_logs import RunLogs
from empo2_jax.run_record import CONFIG_FILE, RunLock, check_same_run, record_command, record_config
from empo2_jax.types import Episode

TRIALS_FOLDER, FACTS_FILE = "trials", "critic.json"


def run(config: Config, resume: str = "auto", command: Sequence[str] = ()) -> Path:
    """Run the baseline that `algorithm.name` names and write the report; returns the run directory.

    Args:
        config: The whole experiment.
        resume: `auto` goes on after what is there; `never` refuses a directory with results.
        command: The command line, for the report.

    Raises:
        ConfigError: several processes, which only training can use.
        CheckpointError: the directory holds another experiment.
    """
    if distributed.current().size > 1:
        raise ConfigError(f"algorithm.name = {config.algorithm.name!r} runs in one process")
    with ExitStack() as stack:
        stack.enter_context(RunLock(config.run_dir))
        _claim(config, resume)
        record_command(config.run_dir, command)
        record_config(config)
        family = assembly.make_family(config)
        stack.callback(family.close)
        start = config.run_dir / "start"
        folder = warmstart.ensure_start(config, family, start) if config.warmstart.updates else None
        policy = assembly.load_policy(config.model, folder)
        engine = assembly.make_engine(config, policy)
        stack.callback(engine.close)
        engine.load(policy.params, 0)
        collector = assembly.make_collector(config, policy, engine, family)
        stack.callback(collector.close)
        if config.algorithm.name == "reflexion":
            writer = AfterFailure(assembly.make_writer(config, policy, family))
            reflexion(config, family, collector, writer, policy.tokenizer.decode)
        else:
            choosing = partial(assembly.make_choosing_collector, config, policy, engine, family)
            embed = assembly.make_embedder(config, tips=True).embed
            retrospex(config, family, collector, choosing, embed, policy.tokenizer.decode)
        write_report(config.run_dir)
    return config.run_dir


def _claim(config: Config, resume: str) -> None:
    folder = config.run_dir
    if resume not in ("auto", "never"):
        raise CheckpointError(f"--resume {resume}: auto or never is allowed for {config.algorithm.name}")
    there = [path for name in (TRIALS_FOLDER, EPISODES_FOLDER, "checkpoints") for path in (folder / name).glob("*")]
    if there and resume == "never":
        raise CheckpointError(f"{folder}: has results; use --resume auto or another run.dir")
    if there:
        check_same_run(load_config(folder / CONFIG_FILE), config)


def reflexion(
    config: Config,
    family: EnvironmentFamily,
    collector: Collector,
    writer: TipWriter,
    decode: Callable[[Sequence[int]], str],
) -> list[Trial]:
    """The trials of Reflexion on the panel, those of an earlier process included.

    Metrics, episodes and `adaptations.jsonl` are written after every trial, and then the file that says it is finished.
    An episode that failed is made up for by the next trial; those of the last one are played again by the next process.

    Raises:
        EnvError: all episodes of a trial failed.
        DataError: the file of a finished trial cannot be read.
    """
    tasks, repeats = panel_tasks(family, config.evaluation), range(config.evaluation.repeats)
    chains = {chain.id: chain for chain in (Chain(task, repeat) for task in tasks for repeat in repeats)}
    trials: list[Trial] = []
    totals = dict.fromkeys(spent([]), 0)

    def take(episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            chains[_chain_of(episode)] = chains[_chain_of(episode)].after(episode, config.reflexion.kept)
        trials.append(_summary(list(chains.values()), episodes))
        totals.update({name: totals[name] + value for name, value in spent(episodes).items()})

    valid: dict[str, Episode] = {}  # of a last trial in which others failed
    while len(trials) < config.reflexion.trials and (file := _trial_file(config, len(trials) + 1)).is_file():
        episodes = _read_trial(file, chains.keys())
        if len(trials) + 1 == config.reflexion.trials and not all(one.stop_reason.valid for one in episodes):
            valid = {one.id: one for one in episodes if one.stop_reason.valid}
            _forget_after(config, len(trials) + 1)
            break
        take(episodes)
    cursor = {"metrics_lines": len(trials), "iteration": len(trials)}
    with (
        closing(RunLogs(config.run_dir, cursor, config.run, writes=True, decode=decode)) as logs,
        RunProgress(config.reflexion.trials, len(trials), unit="trial") as progress,
    ):
        while len(trials) < config.reflexion.trials and not all(chain.solved for chain in chains.values()):
            clock, number = Stopwatch(), len(trials) + 1
            assignments = [
                Assignment(
                    f"{chain.id}/t{number}", chain.task, seed=config.evaluation.seed, reflections=chain.reflections
                )
                for chain in chains.values()
                if not chain.solved
            ]
            missing = [item for item in assignments if item.id not in valid]
            played = collector.collect(missing, temperature=config.evaluation.temperature, writer=writer)
            found = valid | {episode.id: episode for episode in played}
            episodes = [found[item.id] for item in assignments]
            refuse_total_failure(episodes, f"reflexion, trial {number}")
            take(episodes)
            metrics = _metrics(trials[-1], episodes, totals) | clock.metrics()
            logs.iteration(number, metrics)
            logs.episodes(number, episodes, config.run.episodes_logged)
            line = record(trials, iteration=0, split=config.evaluation.split, memory="empty")
            write_atomically(config.run_dir / ADAPTATIONS_FILE, json.dumps(line) + "\n")
            write_atomically(_trial_file(config, number), to_bytes(episodes))
            progress.update(number, metrics)
    return trials


def retrospex(
    config: Config,
    family: EnvironmentFamily,
    collector: Collector,
    choosing: Callable[[Chooser], Collector],
    embed: Embed,
    decode: Callable[[Sequence[int]], str],
) -> tuple[Panel, Panel]:
    """Experience of the policy, a critic of it, and the panel without and with the critic's say.

    Args:
        config: `run.iterations` rounds of `rollout.tasks_per_iteration` × `rollout.group_size` training episodes.
        family: The world.
        collector: Plays as the policy does.
        choosing: Makes the collector that asks a chooser.
        embed: Text to vectors, for the critic.
        decode: Text of token ids, for the episodes.

    Raises:
        EnvError: all episodes of a round or of the panel failed.
        ConfigError: nothing is there to learn from.
    """
    settings, rounds, episodes = config.retrospex, config.run.iterations, config.run_dir / EPISODES_FOLDER
    done = next(number for number in count() if not (episodes / f"{number + 1}.jsonl").is_file())
    totals = read_metrics(config.run_dir)[done - 1] if done else {}
    cursor = {"metrics_lines": done, "iteration": done}
    opened = RunLogs(config.run_dir, cursor, config.run, writes=True, decode=decode)
    with closing(opened) as logs, RunProgress(rounds, done, unit="round") as progress:
        for number in range(done, rounds):
            clock = Stopwatch()
            played = collector.collect(_round(config, family, number), temperature=config.rollout.temperature)
            refuse_total_failure(played, f"retrospex, round {number + 1}")
            panel = summarize(played)
            totals = {f"total/{name}": totals.get(f"total/{name}", 0) + value for name, value in spent(played).items()}
            metrics = {"episode/score": panel.score, "episode/success_rate": panel.success, "actor/updates": 0.0}
            logs.iteration(number + 1, metrics | totals | clock.metrics())
            logs.episodes(number + 1, played, len(played))
            progress.update(number + 1, metrics)
        past = recorded(config.run_dir, family.name) if rounds else []
        past += [item for folder in settings.runs for item in recorded(Path(folder), family.name)]
        past += solved(family, family.tasks("train"), settings.gold)
        if not past:
            raise ConfigError("retrospex: run.iterations = 0, retrospex.gold = 0 and no retrospex.runs: no experience")
        data = transitions(past, family, embed)
        note(f"critic: {settings.updates} updates on {len(data.rewards)} steps of {len(past)} episodes")
        critic, losses = train_critic(data, settings, seed=config.run.seed)
        critic.save(config.run_dir / CRITIC_FILE)
        facts = {"episodes": len(past), "transitions": len(data.rewards), "losses": losses}
        write_atomically(config.run_dir / FACTS_FILE, json.dumps(facts))
        note(f"evaluating on {config.evaluation.split}, without memory (the policy, then with its critic)")
        plain = evaluate(collector, family, config.evaluation)
        chooser = Rescorer(family, embed, critic.values, settings.decay, settings.limit)
        proposals = config.evaluation.model_copy(update={"temperature": settings.temperature})
        with closing(choosing(chooser)) as chooses:
            rescored = evaluate(chooses, family, proposals)
        for label, result in (("start", plain), ("end", rescored)):
            logs.evaluation(result.record(label, rounds, config.evaluation.split))
    return plain, rescored


def _round(config: Config, family: EnvironmentFamily, number: int) -> list[Assignment]:
    """A group of episodes of every task that is next in turn."""
    tasks, size = family.tasks("train"), config.rollout.tasks_per_iteration
    drawn = [tasks[(number * size + place) % len(tasks)] for place in range(size)]
    return [
        Assignment(f"i{number}/g{group}/e{member}", task)
        for group, task in enumerate(drawn)
        for member in range(config.rollout.group_size)
    ]


def _summary(chains: Sequence[Chain], episodes: Sequence[Episode]) -> Trial:
    """Every chain's newest episode (an invalid one of this trial as such) and its best one."""
    tried = {_chain_of(episode): episode for episode in episodes}
    newest = [tried.get(chain.id, chain.newest) for chain in chains]
    best = [chain.best for chain in chains if chain.best is not None]
    return Trial(summarize([episode for episode in newest if episode is not None]), summarize(best))


def _metrics(trial: Trial, episodes: Sequence[Episode], totals: Mapping[str, int]) -> dict[str, float]:
    """The line of a trial; `episode/*` counts solved problems with the episode that solved them."""
    return {
        "episode/score": trial.now.score,
        "episode/success_rate": trial.now.success,
        "episode/length": fmean(len(episode.steps) for episode in trial.now.episodes),
        "episode/invalid": fmean(not episode.stop_reason.valid for episode in episodes),
        "reflexion/best_score": trial.best.score,
        "reflexion/best_success_rate": trial.best.success,
        "reflexion/tried": float(len(episodes)),
        "actor/updates": 0.0,
        **{f"total/{name}": float(value) for name, value in totals.items()},
    }


def _trial_file(config: Config, number: int) -> Path:
    return config.run_dir / TRIALS_FOLDER / f"{number}.episodes"


def _chain_of(episode: Episode) -> str:
    return episode.id.rpartition("/")[0]


def _forget_after(config: Config, number: int) -> None:
    """Remove the files of later trials, of a run that was longer: they continue what is played again."""
    while (file := _trial_file(config, number := number + 1)).is_file():
        file.unlink()


def _read_trial(file: Path, chains: Set[str]) -> list[Episode]:
    try:
        episodes = from_bytes(file.read_bytes())[0]
        if strange := [episode.id for episode in episodes if _chain_of(episode) not in chains]:
            raise ValueError(f"{strange[0]} is of no problem of this run")
    except (OSError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise DataError(f"{file}: no finished trial: {error}; remove it and those after it to repeat them") from None
    return episodes
