"""Group-relative advantages (paper section 4.1; GRPO) and discounted returns, in numpy on the host.

Returns come from the environment, never from surviving rows. This module knows neither episodes nor tokens.
"""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int


def group_advantages(
    returns: Float64[np.ndarray, " G"],
    valid: Bool[np.ndarray, " G"],
    modes: Int[np.ndarray, " G"],
    *,
    baseline: Literal["group", "mode"] = "group",
    normalization: Literal["std", "none"] = "std",
    eps: float = 1e-6,
    std_floor: float = 0.0,
) -> Float64[np.ndarray, " G"]:
    """A = (R − mean) / max(std + eps, std_floor) over the valid members of one group; ddof 1.

    Args:
        returns: R of every member, points; those of invalid members are ignored.
        valid: Members that may enter mean and deviation.
        modes: Mode of every member; 0 acted without tips, any other with tips.
        baseline: `group` compares with all valid members, `mode` plain ones with plain ones and tips with tips; a part
            with fewer than 2 valid members falls back to the group.
        normalization: `none` only subtracts the mean: the advantage is in points.
        eps: Added to the deviation.
        std_floor: Least value to divide by, points.

    Returns:
        Advantages; 0 for invalid members, for fewer than 2 valid ones and for zero deviation.
    """
    advantages = np.zeros_like(returns)
    for part in (modes == 0, modes != 0) if baseline == "mode" else (np.ones_like(valid),):
        members = valid & part
        peers = members if members.sum() >= 2 else valid
        if peers.sum() < 2 or np.ptp(returns[peers]) == 0:
            continue
        scale = max(float(returns[peers].std(ddof=1)) + eps, std_floor) if normalization == "std" else 1.0
        advantages[members] = (returns[members] - returns[peers].mean()) / scale
    return advantages


def discounted_returns(rewards: Float64[np.ndarray, " S"], discount: float) -> Float64[np.ndarray, " S"]:
    """G_t = Σ_{k ≥ t} discount^(k − t) · r_k of one episode, points."""
    returns = np.zeros_like(rewards)
    later = 0.0
    for step in reversed(range(len(rewards))):
        later = rewards[step] + discount * later
        returns[step] = later
    return returns
