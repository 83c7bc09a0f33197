"""`empo2 …`: the command line. Parses, calls one function, prints. Each command imports what it needs when it runs.

A mistake of the user and memory that ran out are one line on standard error and exit code 2; Ctrl-C and SIGTERM are one
line and 130 or 143.
"""

import argparse
import difflib
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from empo2_jax import cli_envs, cli_studies, shop
from empo2_jax.cache import cache_folder
from empo2_jax.config_file import dump_toml, load_config
from empo2_jax.config_options import at_least, config_of, config_options, names
from empo2_jax.errors import ConfigError, Empo2Error, GangError, in_one_line
from empo2_jax.hardware import HARDWARE
from empo2_jax.interrupts import Stopped, no_interrupt_lost, stopped_by_sigterm, uninterrupted
from empo2_jax.output import output_written
from empo2_jax.rollout import serve_options

RESUME_HELP = (
    "auto: continue or start; never: refuse a directory with checkpoints; PATH: go back to that checkpoint "
    "(default: auto)"
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `ConfigError`s."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s")
    # Compiled functions are kept between processes: a resumed run or the next seed of a study compiles nothing.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder("xla")))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        _refuse_other_text(arguments)
        known, rest = build_parser().parse_known_args(arguments)
        if rest:
            raise ConfigError(_unknown_option(rest[0], known.options))
        known.arguments = arguments
        with no_interrupt_lost(), stopped_by_sigterm("stopped"), output_written():
            return known.call(known)
    except (Empo2Error, OSError, MemoryError, RuntimeError) as error:
        line = in_one_line(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 75 if isinstance(error, GangError) else 2  # 75: `distributed.EXIT_GANG`
    except (Stopped, KeyboardInterrupt) as end:
        print(f"{str(end) or 'interrupted'}; resume with: empo2 {shlex.join(arguments)}", file=sys.stderr)
        return 143 if isinstance(end, Stopped) else 130  # 128 + the signal: a scheduler starts the run again


def _refuse_other_text(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for bytes that are no UTF-8: no file that is written could name them."""
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise ConfigError(f"{os.fsencode(argument)!r}: text in UTF-8 is allowed")


def build_parser() -> Parser:
    """All commands with their options."""
    parser = Parser(prog="empo2", description="EMPO²: agents that explore with memory and learn from it.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)

    train = _command(commands, "train", _train, "train a policy; continues where the run directory stands")
    config_options(train)
    train.add_argument("--resume", default="auto", metavar="auto|never|PATH", help=RESUME_HELP)
    text = "start as a copy of another run at a checkpoint, with the keys changed that CONFIG and options change"
    train.add_argument("--from", dest="source", metavar="RUN@STEP", help=text)
    train.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, for a run of several processes")
    train.add_argument("--num-processes", type=int, metavar="N", help="of the run (default: Slurm, TPU or EMPO2_*)")
    train.add_argument("--process-id", type=int, metavar="N", help="of this one, from 0")
    train.add_argument("--start-timeout", type=float, default=600.0, metavar="S", help="to wait for the others (600)")
    train.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the plan; run nothing"
    )

    planner = _command(commands, "plan", _plan, "whether a run fits a machine and what an update costs, without it")
    config_options(planner, "?")
    planner.add_argument("--hardware", default="", metavar="NAME", help="accelerator, for example a100-40")
    planner.add_argument("--devices", type=int, metavar="N", help="how many (default: model.mesh's, or the preset's)")
    planner.add_argument("--processes", type=int, default=1, metavar="N", help="that share the devices (default: 1)")
    planner.add_argument("--share", type=float, default=0.4, metavar="X", help="of the peak, reached (default: 0.4)")
    planner.add_argument("--formula", action="store_true", help="temporaries by a formula, without the compiler")
    planner.add_argument("--table", action="store_true", help="print docs/plan.md: every size on every accelerator")
    planner.add_argument("--presets", action="store_true", help="print the meshes of that table, searched anew")

    warmstart = _command(commands, "warmstart", _warmstart, "supervised start on transcripts of training variations")
    config_options(warmstart)
    warmstart.add_argument("--out", type=Path, metavar="DIR", help="new model folder (default: <run directory>/start)")

    evaluate = _command(commands, "evaluate", _evaluate, "run the panel (no memory) on a run's checkpoint")
    _run_options(evaluate)
    evaluate.add_argument("--split", choices=("train", "dev", "test"), help="(default: as configured)")
    evaluate.add_argument("--repeats", type=int, metavar="N", help="episodes per variation (default: as configured)")
    evaluate.add_argument("--panel", type=Path, metavar="FILE", help="panel file (default: as configured)")

    adapt = _command(commands, "adapt", _adapt, "test-time adaptation: weights fixed, tips from test episodes")
    _run_options(adapt)
    adapt.add_argument("--trials", type=int, default=10, metavar="K", help="episodes per variation (default: 10)")
    adapt.add_argument("--split", choices=("train", "dev", "test"), help="(default: as configured)")
    adapt.add_argument("--tasks", metavar="A,B", help="of the environment (default: as configured)")
    adapt.add_argument("--panel", type=Path, metavar="FILE", help="panel file (default: as configured)")
    adapt.add_argument("--keep-memory", action="store_true", help="begin with the run's tips instead of none")

    serve_options.add_options(_command(commands, "serve", _serve, "serve a model folder through SGLang's HTTP API"))

    memory = _command(commands, "memory", None, "the tips of a run").add_subparsers(required=True, metavar="COMMAND")
    inspect = _command(memory, "inspect", _memory_inspect, "list tips, best first")
    _run_options(inspect)
    inspect.add_argument("--buffer", default="", metavar="TEXT", help="only buffers whose name contains TEXT")
    inspect.add_argument("--limit", type=int, default=20, metavar="N", help="tips shown (default: 20)")

    checkpoint = _command(commands, "checkpoint", None, "the checkpoints of a run")
    actions = checkpoint.add_subparsers(required=True, metavar="COMMAND")
    _run_options(_command(actions, "hash", _hash, "one hash over parameters, optimizer, memory, novelty and metrics"))
    verify = _command(actions, "verify", _verify, "check every manifest")
    verify.add_argument("run", type=Path, metavar="RUN", help="run directory")

    fetch = _command(commands, "fetch", _fetch, "bring a run from storage (run.mirror) to this machine")
    fetch.add_argument("url", metavar="URL", help="for example s3://bucket/runs/mine")
    fetch.add_argument("run", type=Path, metavar="RUN", help="run directory without checkpoints")

    convert = _command(commands, "convert", None, "model formats").add_subparsers(required=True, metavar="COMMAND")
    gguf = _command(convert, "from-gguf", _from_gguf, "GGUF file to a Hugging Face folder")
    gguf.add_argument("file", type=Path, metavar="FILE", help="GGUF file of a Llama- or Qwen2-like model")
    gguf.add_argument("out", type=Path, metavar="DIR", help="new folder")
    to_hf = _command(convert, "to-hf", _to_hf, "a run's policy to a Hugging Face folder")
    _run_options(to_hf)
    to_hf.add_argument("out", type=Path, metavar="DIR", help="new folder")
    to_hf.add_argument("--adapter", action="store_true", help="the LoRA adapter alone, for PEFT (default: merged)")
    _command(convert, "smollm2", _smollm2, "download SmolLM2-135M-Instruct and convert it into the cache")

    cli_studies.add_commands(commands, _command)
    _command(commands, "paper", _paper, "print docs/paper.md: the paper's numbers, our keys, where they are used")
    bench = _command(commands, "bench", _bench, "speed, memory and exactness against peers, on two pinned cores")
    bench.add_argument("--quick", action="store_true", help="small shapes, at most 6 minutes")
    bench.add_argument("--suite", metavar="A,B", help="only these suites (default: all but soak)")
    bench.add_argument("--episodes", type=int, metavar="N", help="of the suite soak (default: 480, quick: 128)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write every sample")
    bench.add_argument("--check", action="store_true", help="exit with 1 where a stable figure misses its goal")
    shop.add_commands(commands, _command)
    cli_envs.add_commands(commands, _command)
    debug = _command(commands, "debug", _debug, "run the recorded updates of one iteration again, bit for bit")
    debug.add_argument("run", type=Path, metavar="RUN", help="run directory")
    debug.add_argument("--iteration", type=int, required=True, metavar="N", help="iteration, from 1")
    doctor = _command(commands, "doctor", _doctor, "check this machine; non-zero exit if something needed is missing")
    doctor.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="check for this configuration")
    return parser


def _command(commands: Any, name: str, call: Any, text: str) -> Parser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(options=parser, **({"call": call} if call else {}))
    return parser


def _run_options(parser: Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint (default: the newest good one)")


def _unknown_option(option: str, parser: Parser) -> str:
    if not option.startswith("-"):
        return f"unexpected argument `{option}` (see `{parser.prog} --help`)"
    known = [name for name in parser._option_string_actions if name.startswith("--")]
    near = difflib.get_close_matches(option.partition("=")[0], known, n=1, cutoff=0.0)
    return f"unknown option `{option}`; the nearest known option is `{near[0]}`"


def _train(options: argparse.Namespace) -> int:
    at_least("--start-timeout", options.start_timeout, 1)
    config = config_of(options)
    with uninterrupted():
        from empo2_jax import distributed
    member = distributed.membership(os.environ, options.coordinator, options.num_processes, options.process_id)
    if options.dry_run:
        with uninterrupted():
            from empo2_jax import dry_run, fork
        source = fork.parse_source(options.source) if options.source else None
        changed = fork.check_fork(*source, config, options.resume)["changed"] if source else {}
        dry_run.refuse(config, member.processes if member else 1)
        print("\n".join([dump_toml(config), *dry_run.lines(config)]))
        print("".join(f"changed by the fork: {key} {old} → {new}\n" for key, (old, new) in changed.items()), end="")
        return 0
    with uninterrupted():
        from empo2_jax import baselines, fork, trainer
    distributed.initialize(member, limit_s=options.start_timeout)
    resume = options.resume
    if options.source:
        source = fork.parse_source(options.source)
        distributed.current().first(lambda: str(fork.fork(*source, config, resume)), "fork")
        resume = "auto" if resume == "never" else resume  # a new fork has the checkpoint that it goes on from
    run = trainer.run if config.algorithm.learns else baselines.run
    run_dir = run(config, resume=resume, command=["empo2", *options.arguments])
    print(f"report: {run_dir / 'report.html'}")
    return 0


def _plan(options: argparse.Namespace) -> int:
    with uninterrupted():
        from empo2_jax import plan_compile, plan_text, planning
    if options.table or options.presets:
        print(plan_text.table() if options.table else "\n".join(plan_text.preset_lines()))
        return 0
    if options.config is None:
        raise ConfigError("plan needs CONFIG (or --table)")
    if not options.hardware:
        raise ConfigError(f"plan needs --hardware NAME; allowed: {', '.join(HARDWARE)}")
    config = config_of(options)
    plan = planning.make_plan(config, options.hardware, options.devices, options.share, options.processes)
    if not options.formula:
        plan_compile.virtual_devices(plan.devices)
        plan = plan_compile.compiled(plan, config)
    print("\n".join(plan_text.lines(plan, config)))
    return 0 if plan.fits else 1


def _warmstart(options: argparse.Namespace) -> int:
    config = config_of(options)
    folder = options.out or config.run_dir / "start"
    with uninterrupted():
        from empo2_jax import assembly, warmstart
    family = assembly.make_family(config)
    try:
        warmstart.ensure_start(config, family, folder)
    finally:
        family.close()
    print(f"start: {folder}")
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    at_least("--repeats", options.repeats, 1)
    with uninterrupted():
        from empo2_jax.panel_text import print_panel
        from empo2_jax.trained import evaluate_run
    record = evaluate_run(options.run, options.split, options.repeats, options.step, options.panel)
    print_panel(record)
    return 0


def _adapt(options: argparse.Namespace) -> int:
    at_least("--trials", options.trials, 1)
    with uninterrupted():
        from empo2_jax.panel_text import print_adaptation
        from empo2_jax.trained import adapt_run
    choice = {"split": options.split, "tasks": names("--tasks", options.tasks), "panel_file": options.panel}
    print_adaptation(
        adapt_run(options.run, options.trials, keep_memory=options.keep_memory, step=options.step, **choice)
    )
    return 0


def _serve(options: argparse.Namespace) -> int:
    parsed = serve_options.parse_options(options)
    with uninterrupted():
        from empo2_jax.rollout.serve import serve
    return serve(parsed)


def _memory_inspect(options: argparse.Namespace) -> int:
    from empo2_jax.trained import tips_of_run

    at_least("--limit", options.limit, 0)
    tips = tips_of_run(options.run, options.buffer, options.step)
    print(f"{len(tips)} tips in {len({tip['buffer'] for tip in tips})} buffers")
    for tip in tips[: options.limit]:
        print(f"\n{tip['buffer']} · score {tip['score']:.1f} · {tip['episode']} step {tip['step']}\n{tip['content']}")
    return 0


def _hash(options: argparse.Namespace) -> int:
    from empo2_jax.trained import checkpoint_folder

    store, step = checkpoint_folder(options.run, options.step)
    print(store.content_hash(step))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from empo2_jax.checkpoint import CheckpointStore

    results = CheckpointStore(options.run, keep=1).verify()
    for step, problem in results:
        if problem:
            print(f"error: {options.run}: checkpoint {step}: {problem}", file=sys.stderr)
        else:
            print(f"{step}: good")
    if not results:
        raise ConfigError(f"{options.run}: no checkpoints")
    return 2 if any(problem for _, problem in results) else 0


def _fetch(options: argparse.Namespace) -> int:
    from empo2_jax.checkpoint import CheckpointStore
    from empo2_jax.storage import take_over

    take_over(options.run, options.url)
    steps = CheckpointStore(options.run, keep=1).steps()
    if not steps:
        raise ConfigError(f"{options.run}: no checkpoint, and {options.url} has none")
    print(f"{options.run}: checkpoints {steps}")
    return 0


def _from_gguf(options: argparse.Namespace) -> int:
    from empo2_jax.models.gguf_weights import convert_gguf

    convert_gguf(options.file, options.out)
    print(options.out)
    return 0


def _to_hf(options: argparse.Namespace) -> int:
    from empo2_jax.trained import export_adapter, export_run

    export = export_adapter if options.adapter else export_run
    step = export(options.run, options.out, options.step)
    print(f"{options.out}: {'adapter' if options.adapter else 'policy'} of checkpoint {step}")
    return 0


def _smollm2(options: argparse.Namespace) -> int:
    from empo2_jax.assets import smollm2

    print(smollm2())
    return 0


def _paper(options: argparse.Namespace) -> int:
    from empo2_jax.paper import table

    print(table())
    return 0


def _bench(options: argparse.Namespace) -> int:
    from empo2_jax.bench.runner import bench

    suites = names("--suite", options.suite)
    return bench(suites, options.quick, options.json, options.check, options.episodes)


def _debug(options: argparse.Namespace) -> int:
    at_least("--iteration", options.iteration, 1)
    with uninterrupted():
        from empo2_jax.debugging import check
    return 0 if check(options.run, options.iteration, print) else 1


def _doctor(options: argparse.Namespace) -> int:
    config = load_config(options.config) if options.config else None
    from empo2_jax.doctor import diagnose

    checks = diagnose(config)
    table = Table("check", "found", "")
    for check in checks:
        table.add_row(check.name, check.found, "good" if check.ok else "MISSING" if check.needed else "look at this")
    Console().print(table)
    return 1 if any(check.needed and not check.ok for check in checks) else 0
