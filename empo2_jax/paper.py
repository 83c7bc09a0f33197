"""The numbers of the paper (arXiv 2602.23008) and of its released code, key by key: docs/paper.md is made from this.

Not a configuration: presets say what a run uses, and a test holds them to this table. `None` means that the source does
not say. WebShop's numbers that the paper leaves out are those of verl-agent, which it builds on.
"""

from dataclasses import dataclass
from typing import Any

from empo2_jax.config import Config

Value = float | int | str | bool | tuple[str, ...] | None
HEAD = """# The paper's numbers, and where they are here

Made by `empo2 paper > docs/paper.md`; do not edit. Values of the paper for ScienceWorld (preset `paper`), of its
released code (preset `released-code`) and of the paper for WebShop (`configs/webshop_qwen2.5_7b.toml`); – where the
source does not say: both presets have our default there, and the last section has what the WebShop configuration has.
Our default holds where a configuration says nothing; docs/adr and docs/LOG.md say why it differs. "fixed": no key.
"""
OWN = """## WebShop: our own choices

What the paper does not say of WebShop, and what `configs/webshop_qwen2.5_7b.toml` has there (baselines apart):
"""
WEBSHOP_OWN = {
    "memory.placement": "latest",
    "env.train_variations": 100_000,
    "evaluation.repeats": 1,
}  # not the default
NOT_IN_WEBSHOP = ("env.resolution",)  # its actions have one form


@dataclass(frozen=True)
class Setting:
    """One number of the method."""

    part: str
    what: str
    key: str  # section.key; "" = not a setting here
    used: str  # file below empo2_jax/
    paper: Value = None
    code: Value = None
    webshop: Value = None
    fixed: Value = None  # what stands in the code where there is no key
    note: str = ""  # why our presets have another value, or what else is to be known


_Q, _MODEL = 2 / 3, "Qwen/Qwen2.5-7B-Instruct"
SETTINGS = (
    Setting("Modes", "p: share of episodes with tips", "algorithm.p_memory", "algorithms/empo2.py", 0.25, 0.25, 0.25,
            note="ablations 0.1, 0.25, 0.4, 0.7"),
    Setting("Modes", "q: learned without tips, given tips", "algorithm.q_off_policy", "algorithms/empo2.py",
            _Q, _Q, _Q, note="ablations 0.3, 0.5, 0.67, 0.85, 0.95"),
    Setting("Modes", "what one draw of p and q covers", "algorithm.mode_scope", "algorithms/empo2.py", "iteration",
            "iteration", note="Algorithm 1; the text of the paper says each step"),
    Setting("Modes", "old policy of off-policy steps", "algorithm.off_policy_denominator", "trainer.py", "student",
            "behavior", note="section 4.2; the paper's Table 3 and appendix allow both"),
    Setting("Loss", "ε_low", "algorithm.clip_low", "ops/losses.py", 0.2, 0.2, 0.2),
    Setting("Loss", "ε_high", "algorithm.clip_high", "ops/losses.py", 0.3, 0.3, 0.2),
    Setting("Loss", "c: bound where advantages are negative", "algorithm.dual_clip", "ops/losses.py", 10.0, 10.0, 3.0),
    Setting("Loss", "limit of the log ratio, nats", "", "ops/ratios.py", 20.0, 20.0, 20.0, 20.0),
    Setting("Loss", "average of tokens", "algorithm.aggregation", "data/rows.py", None, "seq-mean-token-mean"),
    Setting("Loss", "KL coefficient", "algorithm.kl_coefficient", "ops/losses.py", 0.0, 0.0, 0.01),
    Setting("Loss", "KL estimator", "", "ops/losses.py", webshop="k3", fixed="k3",
            note="e^d − d − 1, d = log π_ref − log π within the limit of the log ratio"),
    Setting("Loss", "limit of the estimate, nats", "", "ops/losses.py", webshop=10.0, fixed=10.0),
    Setting("Loss", "entropy bonus", "algorithm.entropy_coefficient", "ops/losses.py", 0.0, 0.0, 0.001),
    Setting("Loss", "δ: least probability of a token", "algorithm.min_token_prob", "data/rows.py", None, 0.0,
            note="the paper gives no value; the released code drops rows below exp(−5) and ships with it off"),
    Setting("Loss", "what the mask drops", "algorithm.mask_unit", "trainer.py", "token", "row"),
    Setting("Loss", "modes that the mask applies to", "algorithm.mask_modes", "data/rows.py", "off_policy", "all"),
    Setting("Loss", "advantages that the mask applies to", "algorithm.mask_sign", "ops/losses.py", "all", "all"),
    Setting("Advantage", "added to the deviation (ddof 1)", "", "ops/advantages.py", 1e-6, 1e-6, 1e-6, 1e-6),
    Setting("Advantage", "divided by", "algorithm.advantage_normalization", "algorithms/base.py", "std", "std", "std"),
    Setting("Advantage", "least deviation, points", "algorithm.advantage_std_floor", "algorithms/base.py", 0.0, 0.0),
    Setting("Advantage", "GiGPO: w", "algorithm.step_weight", "algorithms/gigpo.py", None, None, 1.0),
    Setting("Advantage", "GiGPO: discount", "algorithm.step_discount", "algorithms/gigpo.py", None, None, 0.95),
    Setting("Novelty", "kind", "intrinsic.kind", "memory/novelty.py", "count", "none",
            note="the released code computes one that never reaches the advantage"),
    Setting("Novelty", "points of a first visit", "intrinsic.coefficient", "memory/novelty.py", 1.0, None,
            note="r = 1/n; ablations ×0.5, ×1, ×2, none, and random network distillation"),
    Setting("Novelty", "cosine from which states are the same", "intrinsic.threshold", "memory/novelty.py"),
    Setting("Memory", "entries per buffer", "memory.capacity", "memory/tips.py", 1000, 1000),
    Setting("Memory", "least cosine, exclusive", "memory.threshold", "memory/tips.py", 0.5, 0.5),
    Setting("Memory", "tips per block, best score first", "memory.top_k", "memory/tips.py", 10, 10),
    Setting("Memory", "what shares a buffer", "memory.scope", "memory/tips.py", "variation", "variation", "task"),
    Setting("Memory", "text that is embedded", "memory.key", "rollout/collect.py", None, "transcript"),
    Setting("Memory", "one tip per episode in a block", "memory.distinct_episodes", "memory/tips.py", False, False),
    Setting("Memory", "a content written again", "memory.duplicates", "memory/tips.py", "drop", "drop"),
    Setting("Memory", "entry that leaves a full buffer", "memory.eviction", "memory/tips.py", "fifo", "fifo"),
    Setting("Memory", "where blocks stand", "memory.placement", "rollout/collect.py", None, "history"),
    Setting("Memory", "tokens of a tip", "memory.tip_max_tokens", "rollout/reflect.py", 32, 32,
            note="printed tips have 18 to 32 tokens; the released code asks for 512, which its server seems to cap"),
    Setting("Memory", "embedder", "memory.embedder", "assembly.py", "minilm", "minilm",
            note="all-MiniLM-L6-v2, 384 dimensions"),
    Setting("Rollout", "tasks per iteration", "rollout.tasks_per_iteration", "experience.py", 16, 16, 16),
    Setting("Rollout", "episodes per task", "rollout.group_size", "experience.py", 8, 8, 8),
    Setting("Rollout", "temperature", "rollout.temperature", "experience.py", 1.0, 1.0, 1.0),
    Setting("Rollout", "tokens per action", "rollout.max_action_tokens", "rollout/collect.py", 32, 32, 512),
    Setting("Rollout", "tokens per episode", "rollout.max_length", "rollout/collect.py", 4500, 4500, 4096,
            note="WebShop: 4,096 of a prompt that shows two pages only; here the history stays, hence 16,384 in all"),
    Setting("Rollout", "pairs of observation and action in a prompt", "", "rollout/collect.py", webshop=2, fixed="all",
            note="the paper shows the last two on WebShop; here the history of an episode stays"),
    Setting("Rollout", "actions per episode", "env.step_limit", "rollout/collect.py", 30, 31, 15),
    Setting("Rollout", "training variations per task", "env.train_variations", "envs/scienceworld.py", 5, 5),
    Setting("Rollout", "first WebShop goal that is trained on", "", "envs/webshop/goals.py", webshop=500, fixed=500,
            note="those below are for evaluation; here the last 500 are a dev split, in neither"),
    Setting("Rollout", "text to action", "env.resolution", "envs/scienceworld.py", None, "released-code",
            note="the released code replaces every action by the most similar one, whatever its verb"),
    Setting("Rollout", "points off for a refused action", "env.invalid_penalty", "envs/webshop/__init__.py", None, None,
            1.0, note="0.1 of 10 in its code is 1 of 100 here"),
    Setting("Optimizer", "policy", "model.path", "assembly.py", _MODEL, _MODEL, _MODEL,
            note="not in the presets; in configs/*_qwen2.5_7b.toml"),
    Setting("Optimizer", "learning rate, constant", "update.learning_rate", "learner/optim.py", 1e-6, 1e-6, 1e-6),
    Setting("Optimizer", "weight decay of AdamW", "update.weight_decay", "learner/optim.py", 0.01, 0.01, 0.01),
    Setting("Optimizer", "largest gradient norm", "update.max_grad_norm", "learner/optim.py", 1.0, 1.0, 1.0),
    Setting("Optimizer", "actions per optimizer step", "update.minibatch_steps", "data/rows.py", 128, 128, 64),
    Setting("Optimizer", "passes over an iteration", "update.epochs", "trainer.py", 1, 1, 1),
    Setting("Evaluation", "split", "evaluation.split", "envs/problems.py", "test", "test", "test"),
    Setting("Evaluation", "variations per task", "evaluation.variations", "envs/problems.py", 20, 20, 500,
            note="7 of the paper's 18 tasks have fewer than 20 test variations (docs/environments.md)"),
    Setting("Evaluation", "episodes per variation", "evaluation.repeats", "evaluation.py", None, 4),
    Setting("Evaluation", "temperature", "evaluation.temperature", "evaluation.py", 0.4, 0.4, 0.4),
    Setting("Evaluation", "trials of adaptation on other tasks", "", "cli.py", 10, None, 10, 10,
            note="`empo2 adapt --trials`, in studies `adaptation_trials`"),
    Setting("Baselines", "Reflexion: trials", "reflexion.trials", "baselines.py", 10, None, 10),
    Setting("Baselines", "Reflexion: reflections that are shown", "reflexion.kept", "baselines.py", 3, None, 3),
    Setting("Baselines", "Retrospex: expectile τ", "retrospex.expectile", "learner/critic.py", 0.7, None, 0.7,
            note="its β = 3 belongs to a step of IQL that is not taken: the policy imitates"),
    Setting("Baselines", "Retrospex: discount γ", "retrospex.discount", "learner/critic.py", 0.99, None, 0.99),
    Setting("Baselines", "Retrospex: learning rate", "retrospex.learning_rate", "learner/critic.py", 1e-4, None, 1e-4),
    Setting("Baselines", "Retrospex: d", "retrospex.decay", "algorithms/retrospex.py", 0.97, None, 0.9,
            note="the policy's share of an action's score is max(limit, d^step)"),
    Setting("Baselines", "Retrospex: limit", "retrospex.limit", "algorithms/retrospex.py", 0.6, None, 0.5),
)  # fmt: skip


def default(setting: Setting) -> Any:
    """Our default of a setting, or what is fixed where it has no key."""
    value: Any = Config()
    for part in setting.key.split(".") if setting.key else ():
        value = getattr(value, part)
    return value if setting.key else setting.fixed


def webshop_own() -> dict[str, Any]:
    """By key, what the WebShop configuration has where the paper does not say."""
    unsaid = (s for s in SETTINGS if s.key and s.webshop is None and s.key not in NOT_IN_WEBSHOP)
    return {s.key: WEBSHOP_OWN.get(s.key, default(s)) for s in unsaid}


def table() -> str:
    """docs/paper.md: a table per part of the method."""
    lines = [HEAD]
    for part in dict.fromkeys(setting.part for setting in SETTINGS):
        lines += [f"## {part}\n", "| what | paper | released code | WebShop | key | our default | used in |"]
        lines.append("|---|---|---|---|---|---|---|")
        for setting in (setting for setting in SETTINGS if setting.part == part):
            values = (setting.paper, setting.code, setting.webshop)
            key = f"`{setting.key}`" if setting.key else "fixed"
            what = f"{setting.what}{f' ({setting.note})' if setting.note else ''}"
            cells = [what, *map(_text, values), key, _text(default(setting)), f"`{setting.used}`"]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join([*lines, OWN, *(f"- `{key}` = {_text(value)}" for key, value in webshop_own().items())])


def _text(value: Value) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
