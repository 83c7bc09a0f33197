"""`run(config)`: the loop. One iteration = experience (draw, collect, reward, commit), rows, ledgers, update, load.

Everything random is a function of (seed, iteration, …), and all that lives over iterations is in one checkpoint, so a
run that was killed continues as if nothing had happened. What is printed and plotted is in `metrics` and `report`.
"""

import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from empo2_jax import assembly, distributed, storage, warmstart
from empo2_jax.alarms import CANARIES, MAX_GAP, count_skipped, warn, warn_of_trends
from empo2_jax.algorithms.base import StepAdvantages, group_metrics, spent, valid_episodes
from empo2_jax.checkpoint import CheckpointStore, check_same_base
from empo2_jax.config import Config
from empo2_jax.config_file import load_config
from empo2_jax.data.packing import branch_room, fits, pack
from empo2_jax.data.rows import build_rows, drop_unlikely_steps, minibatches, token_weights
from empo2_jax.errors import CheckpointError
from empo2_jax.evaluation import evaluate
from empo2_jax.experience import Experience
from empo2_jax.interrupts import Stopped
from empo2_jax.learner.ledgers import fill, scorer
from empo2_jax.learner.optim import policy_rate
from empo2_jax.learner.step import LearnerState
from empo2_jax.metrics import Stopwatch
from empo2_jax.ops.losses import finalize_metrics
from empo2_jax.progress import RunProgress, note
from empo2_jax.randomness import generator
from empo2_jax.readers import read_json
from empo2_jax.recorded_updates import UpdateRecorder
from empo2_jax.records import Evaluated
from empo2_jax.report import write_report
from empo2_jax.rollout import ahead
from empo2_jax.rollout.journal import Journals
from empo2_jax.run_logs import RunLogs
from empo2_jax.run_record import CONFIG_FILE, RunLock, check_same_run, moved, record_command, record_config
from empo2_jax.types import Episode, EpisodeGroup, Row
from empo2_jax.watch import Watch, WatchedEngine


def run(config: Config, resume: str = "auto", command: Sequence[str] = ()) -> Path:
    """Train to `run.iterations` and write the report; returns the run directory.

    Args:
        config: The whole experiment.
        resume: `auto` continues the newest good checkpoint or starts; `never` refuses a directory with checkpoints; a
            path of one of the run's checkpoints goes back to it.
        command: The command line, for the report.

    Raises:
        Empo2Error: whatever the user or the world did wrong, in one line.
        Stopped: by SIGTERM; what was complete is in a checkpoint.
        KeyboardInterrupt: the same by Ctrl-C, or, pressed twice, at once.
    """
    gang, folder = distributed.current(), config.run_dir
    with ExitStack() as stack:
        with gang.patient(storage.LIMIT_S + storage.AGAIN_S if config.run.mirror else 0.0):  # a fetch may take so long
            gang.first(partial(_claim, config, resume, command, stack), "run directory")
        trainer = Trainer(config, stack)
        gang.first(lambda: record_config(config), "configuration")
        stack.enter_context(trainer.watch)
        try:
            trainer.restore(resume)
            trainer.loop()
        except Stopped:
            trainer.save_complete()
            end = KeyboardInterrupt if trainer.watch.interrupted else Stopped
            raise end(f"{folder}: stopped; checkpoints {trainer.store.steps()}") from None
        gang.first(lambda: str(write_report(folder)), "report")
    return folder


def _claim(config: Config, resume: str, command: Sequence[str], stack: ExitStack) -> None:
    """Lock the run directory for this experiment. One that never got to a checkpoint may be claimed again."""
    stack.enter_context(RunLock(config.run_dir))
    stack.enter_context(storage.Mirror(config.run_dir, config.run.mirror))
    steps = CheckpointStore(config.run_dir, config.checkpoint.keep).steps()
    if resume == "never" and steps:
        raise CheckpointError(f"{config.run_dir}: has checkpoints; use --resume auto or another run.dir")
    if steps:
        check_same_run(load_config(config.run_dir / CONFIG_FILE), config)
    record_command(config.run_dir, command)


class Trainer:
    """The parts of one run and its state; opened resources go to `stack`."""

    def __init__(self, config: Config, stack: ExitStack):
        self.config, self.gang = config, distributed.current()
        self.watch = Watch(self.gang, config.run.watchdog_s)
        self.family = self.gang.agree(lambda: assembly.make_family(config), "environment")
        stack.callback(self.family.close)
        start = self._start()
        self.policy = self.gang.agree(lambda: assembly.load_policy(config.model, start), "policy")
        self.algorithm: Any = importlib.import_module(f"empo2_jax.algorithms.{config.algorithm.name}")
        embedder = assembly.make_embedder(config)
        self.memory = assembly.make_memory(config.memory, embedder)
        self.novelty = assembly.make_novelty(config.intrinsic, config.memory, embedder, config.run.seed)
        self.engine = WatchedEngine(assembly.make_engine(config, self.policy), self.watch)
        stack.callback(self.engine.close)
        self.collector = self.gang.agree(
            lambda: assembly.make_collector(config, self.policy, self.engine, self.family), "collector"
        )
        stack.callback(self.collector.close)
        self.writer = assembly.make_writer(config, self.policy, self.family) if config.algorithm.p_memory > 0 else None
        tasks = self.family.tasks("train")
        remote, algorithm = config.rollout.engine != "jax", config.algorithm
        self.journals = Journals(config.run_dir, self.gang.process) if remote else None
        parts = (self.collector, self.memory, self.novelty, self.writer, self.journals)
        self.experience = Experience(config, tasks, self.algorithm, *parts)
        self.parts = assembly.learner_parts(config, self.policy)
        self.learner = assembly.make_learner(config, self.parts.graphdef, self.parts.frozen, self.policy.mesh)
        anchored = config.algorithm.kl_coefficient > 0
        self.reference = jax.tree.map(lambda leaf: leaf.copy(), self.parts.trainable) if anchored else None
        # The learner takes these arrays over (and donates them); the engine is given a copy in `restore`.
        self.state: LearnerState = self.learner.init(self.parts.trainable)
        self.store = CheckpointStore(config.run_dir, *config.checkpoint.kept)
        self.updates = UpdateRecorder(config.run_dir, config.run.updates_kept, writes=self.gang.writes)
        self.iteration = 0
        self._max_gap = CANARIES * config.canary_tolerance if remote else MAX_GAP[config.model.compute_dtype]
        differs = remote or config.rollout.max_staleness > 0
        self.corrected = differs if algorithm.rollout_correction == "auto" else algorithm.rollout_correction == "on"
        self._complete = False  # whether the state, the memory and the logs are those of the end of `iteration`
        self._sampled = 0  # tokens of the newest rollout
        self._skipped = 0  # updates in a row, up to now
        self.totals = {"environment_steps": 0, "prompt_tokens": 0, "sampled_tokens": 0, "tip_calls": 0}
        self._stack = stack

    def _start(self) -> Path | None:
        """Folder of the warm-started policy, made when the configuration asks for one and none is there."""
        if not self.config.warmstart.updates:
            return None
        if CheckpointStore(self.config.run_dir, self.config.checkpoint.keep).steps():
            return self.config.run_dir / "start"  # `_claim` compared the settings that matter
        return warmstart.ensure_start(self.config, self.family, self.config.run_dir / "start")

    def restore(self, resume: str) -> None:
        """Continue a checkpoint, or begin: logs are cut to what the checkpoint knows."""
        step = self._chosen(resume)
        cursor: dict[str, Any] = {}
        ready: list[ahead.Rollout] = []
        if step is not None:
            state, folder, cursor = self.store.restore(step, self.state)
            check_same_base(self.config.run_dir, cursor, self.parts.base, self.policy.folder)
            self.store.set_aside_after(step)
            self.state = LearnerState(*state)
            self.memory.load(folder / "memory")
            self.novelty.load(folder / "novelty")
            ready = ahead.load(folder / "rollouts")
            self.iteration, self.totals = cursor["iteration"], cursor["totals"]
            self._skipped = cursor["skipped_in_a_row"]
            if told := moved(cursor.get("place", {}), self._place):
                note(told)
        self._drop_journals(-1 if step is None else step)
        self.engine.load(self._served(), self.iteration)
        settings = {"writes": self.gang.writes, "decode": self.policy.tokenizer.decode}
        opened = partial(RunLogs, self.config.run_dir, cursor, self.config.run, **settings)
        self.logs = self.gang.agree(opened, "logs")
        self._stack.callback(self.logs.close)
        self.rollouts = ahead.Rollouts(
            self.experience.make,
            first=self.iteration,
            total=self.config.run.iterations,
            max_staleness=self.config.rollout.max_staleness,
            stop=self._stop_collecting,
            ready=ready,
        )
        self._stack.callback(self.rollouts.close)
        self._complete = step is not None
        if step is None:
            self._evaluate_start()
            self.save()

    def _chosen(self, resume: str) -> int | None:
        if resume in ("auto", "never"):
            return self.store.latest()
        path = Path(resume)
        if not path.name.isdecimal() or path.parent.resolve() != (self.config.run_dir / "checkpoints").resolve():
            raise CheckpointError(
                f"--resume {resume}: auto, never or {self.config.run_dir}/checkpoints/<step> is allowed"
            )
        return int(path.name)

    def _evaluate_start(self) -> None:
        before = self.config.run_dir / "start" / "before.json"
        if self.config.warmstart.updates and before.is_file():
            self.logs.evaluation(read_json(before, Evaluated))
        self.evaluate("start")

    def loop(self) -> None:
        """All remaining iterations."""
        total, every = self.config.run.iterations, self.config.evaluation.every
        self.rollouts.go(self.iteration)
        with RunProgress(total, self.iteration) as progress:
            while self.iteration < total:
                clock = Stopwatch()
                metrics = self.iterate(clock)
                last = self.iteration == total
                evaluates = last or bool(every and self.iteration % every == 0)
                saves = last or self.iteration % self.config.checkpoint.every == 0
                held = self.rollouts.hold(always=evaluates or saves)
                if held:
                    self.engine.load(self._served(), self.iteration)
                metrics |= self.engine.metrics() | clock.metrics()
                warn(metrics, self.config.update.learning_rate, self._max_gap, self.policy.model.config.vocab_size)
                if evaluates:
                    metrics |= self.evaluate("end" if last else "during")
                self.logs.iteration(self.iteration, metrics)
                warn_of_trends(self.logs.newest)
                self._complete = True
                if saves:
                    self.save()
                if held:
                    self.rollouts.go(self.iteration)
                progress.update(self.iteration, metrics)

    def iterate(self, clock: Stopwatch) -> dict[str, float]:
        """The updates on the next rollout; afterwards `self.iteration` counts them. The engine keeps its weights."""
        rollout, waited = self.rollouts.take()
        self._complete = False
        if self.config.rollout.release_memory:
            self.engine.release_memory()
        clock.lap("wait")
        groups, episodes = rollout.groups, valid_episodes(rollout.groups)
        metrics = group_metrics(groups) | self._traffic(groups) | self._staleness(episodes)
        metrics |= self.update(episodes, self.algorithm.advantages(groups, self.config.algorithm))
        clock.lap("update")
        self.iteration += 1
        self.logs.episodes(
            self.iteration, [episode for group in groups for episode in group.episodes], self.config.run.episodes_logged
        )
        metrics |= rollout.metrics
        metrics |= {f"total/{name}": float(value) for name, value in self.totals.items()}
        metrics["memory/tips_missing"] = float(sum(not episode.tip for episode in episodes)) if self.writer else 0.0
        clock.seconds |= {**rollout.seconds, "wait": waited}
        return metrics | (ahead.speeds(rollout.seconds, waited, self._sampled) if rollout.seconds else {})

    def update(self, episodes: Sequence[Episode], advantages: Sequence[StepAdvantages]) -> dict[str, float]:
        """Rows, ledgers, mini-batches, optimizer steps; the metrics of all of them.

        `actor/updates` counts the optimizer steps, `actor/skipped_updates` those left out because nothing finite was to
        be applied (no other metric has a part of them), `actor/lr` is the learning rate of the last one.
        """
        algorithm, update = self.config.algorithm, self.config.update
        sizes = (update.buckets, update.micro_batch_tokens, self.learner.row_multiple)
        room = branch_room(*sizes) if self.config.memory.placement == "latest" else None
        rows = build_rows(
            episodes,
            advantages,
            min_token_prob=algorithm.min_token_prob,
            mask_modes=algorithm.mask_modes,
            branch_room=room,
        )
        fitting = [row for row in rows if fits(row, *sizes)]
        metrics = {
            "actor/rows_per_episode": len(rows) / max(len(episodes), 1),
            "actor/rows_too_long": float(len(rows) - len(fitting)),
        }
        if not fitting:
            return metrics | {"actor/updates": 0.0, "actor/skipped_updates": 0.0}
        self.watch.beat("ledgers")
        score = partial(scorer, self.learner, buckets=update.buckets, micro_batch_tokens=update.micro_batch_tokens)
        filled, gaps = fill(
            fitting,
            episodes,
            score(self.state.params),
            denominator=algorithm.off_policy_denominator,
            correction_cap=algorithm.rollout_correction_cap if self.corrected else None,
            reference=score(self.reference) if self.reference is not None else None,
            branch_room=room,
            policy_version=self.iteration,
        )
        totals: dict[str, np.ndarray] = {}
        count = skipped = 0
        self.updates.begin(self.iteration + 1)
        for epoch in range(update.epochs):
            order = generator(self.config.run.seed, "minibatches", self.iteration, epoch).permutation(len(episodes))
            for part in minibatches([len(e.steps) for e in episodes], update.minibatch_steps, order):
                batches = self._batches(filled, set(part))
                if batches:
                    self.watch.beat("update")
                    self.state, sums = self.learner.update(self.state, batches)
                    self.updates.add(batches, sums)
                    where = f"iteration {self.iteration + 1}, update {count + skipped + 1}"
                    self._skipped = count_skipped(self._skipped, bool(sums.pop("skipped")), where)
                    if self._skipped:
                        skipped += 1
                        continue
                    totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
                    count += 1
        self.updates.end()
        metrics |= gaps | {"actor/updates": float(count), "actor/skipped_updates": float(skipped)}
        if not count:
            return metrics
        metrics["actor/grad_norm"] = float(totals.pop("grad_norm")) / count
        metrics["actor/lr"] = float(np.asarray(policy_rate(update)(int(self.state.updates) - 1)))
        totals.pop("loss")
        return metrics | finalize_metrics(totals, count)

    def _batches(self, rows: Sequence[Row], members: set[int]) -> list[Any]:
        algorithm, update = self.config.algorithm, self.config.update
        weighted = token_weights([row for row in rows if row.episode in members], algorithm.aggregation)
        if algorithm.mask_unit == "row":
            weighted = drop_unlikely_steps(weighted, algorithm.mask_sign)
        return pack(weighted, update.buckets, update.micro_batch_tokens, self.learner.row_multiple).batches

    def evaluate(self, label: str) -> dict[str, float]:
        """Run the panel with the current weights and append it to evaluations.jsonl."""
        note(f"evaluating on {self.config.evaluation.split}, without memory ({label})")
        panel = evaluate(self.collector, self.family, self.config.evaluation)
        self.logs.evaluation(panel.record(label, self.iteration, self.config.evaluation.split))
        return {
            "val/score": panel.score,
            "val/success_rate": panel.success,
            "val/valid_actions": panel.valid_actions,
            "val/complete": float(panel.complete),
        }

    def save_complete(self) -> None:
        """Write the checkpoint of this iteration unless it is there, or the iteration was left in its middle."""
        if self._complete and self.iteration not in self.gang.first(self.store.steps, "checkpoints"):
            self.save()

    def save(self) -> None:
        """Write the checkpoint of this iteration."""
        self.watch.beat("checkpoint")
        cursor = {
            "iteration": self.iteration,
            "base": self.parts.base,
            "place": self._place,
            "totals": self.totals,
            "skipped_in_a_row": self._skipped,
            **self.logs.cursor(),
        }
        dumps = {"memory": self.memory.dump, "novelty": self.novelty.dump}
        if self.config.rollout.max_staleness:
            dumps["rollouts"] = partial(ahead.dump, self.rollouts.ready)
        self.store.save(self.iteration, state=self.state, dumps=dumps, cursor=cursor)
        self._drop_journals(self.iteration)

    def _drop_journals(self, version: int) -> None:
        """Of iterations that are over, and of weights newer than `version`, which this run does not have."""
        if self.journals:
            self.gang.first(partial(self.journals.drop, self.iteration, version), "journals")

    @property
    def _place(self) -> dict[str, Any]:
        """What equal bits need, beside the machine and the versions."""
        return {"mesh": list(self.config.model.mesh), "processes": self.gang.size}

    def _served(self) -> Any:
        """Weights for the engine: no array of them will be donated."""
        return assembly.served_params(self.config, self.state.params, self.parts.frozen)

    def _stop_collecting(self) -> None:
        """Make a collection in another thread end soon: the run is over."""
        self.watch.ask()
        self.engine.close()

    def _staleness(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """How many versions older than the trainer's the weights were that sampled the steps of `episodes`."""
        ages = [self.iteration - step.policy_version for episode in episodes for step in episode.steps]
        if not self.config.rollout.max_staleness or not ages:
            return {}
        return {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages))}

    def _traffic(self, groups: Sequence[EpisodeGroup]) -> dict[str, float]:
        """Count what was spent; `memory/hit_rate` is left out where no episode acted with memory."""
        episodes = [episode for group in groups for episode in group.episodes]
        steps = [step for episode in episodes for step in episode.steps]
        cost = spent(episodes)
        self._sampled = cost["sampled_tokens"]
        self.totals = {name: self.totals[name] + value for name, value in cost.items()}
        hits = [bool(step.tips) for episode in episodes if episode.with_memory for step in episode.steps]
        valid = {"episode/valid_actions": float(np.mean([step.valid for step in steps])) if steps else 0.0}
        return valid | ({"memory/hit_rate": float(np.mean(hits))} if hits else {})
