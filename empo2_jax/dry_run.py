"""What a run would do, in a few lines, without running it. Memory and time are `planning`'s."""

from empo2_jax import assembly
from empo2_jax.config import Config
from empo2_jax.envs.problems import panel_tasks, shortfall


def lines(config: Config) -> list[str]:
    """Iterations, tasks, episodes, steps, modes, evaluation; checks that the environment knows the tasks."""
    family = assembly.make_family(config)
    try:
        train, panel = family.tasks("train"), panel_tasks(family, config.evaluation)
        fewer = shortfall(family, config.evaluation)
    finally:
        family.close()
    if config.algorithm.name == "reflexion":
        return [
            f"# plan: {config.reflexion.trials} trials at most of {len(panel)} problems of {family.name} "
            f"({config.evaluation.split}) in {config.run_dir}",
            f"# steps: at most {config.env.step_limit} per episode; no update of the policy",
            f"# warm start: {config.warmstart.updates} updates",
        ]
    rollout, algorithm = config.rollout, config.algorithm
    episodes = rollout.tasks_per_iteration * rollout.group_size
    off = algorithm.p_memory * algorithm.q_off_policy
    evaluations = config.evaluation.repeats * len(panel)
    return [
        f"# plan: {config.run.iterations} iterations in {config.run_dir}",
        f"# tasks: {len({task.name for task in train})} ({len(train)} training variations) of {family.name}",
        f"# episodes: {rollout.tasks_per_iteration} tasks × {rollout.group_size} = {episodes} per iteration, "
        f"{episodes * config.run.iterations} in all",
        f"# steps: at most {config.env.step_limit} per episode, {episodes * config.env.step_limit} per iteration, "
        f"{episodes * config.env.step_limit * config.run.iterations} in all",
        f"# modes: {1 - algorithm.p_memory:.3f} on-policy, {algorithm.p_memory - off:.3f} on-policy with memory, "
        f"{off:.3f} off-policy",
        f"# evaluation: {evaluations} episodes on {config.evaluation.split} every {config.evaluation.every} iterations",
        *([f"# {fewer}"] if fewer else []),
        f"# warm start: {config.warmstart.updates} updates",
        *([] if algorithm.learns else [f"# {algorithm.name}: no update of the policy after its warm start"]),
    ]
