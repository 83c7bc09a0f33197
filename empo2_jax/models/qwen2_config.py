"""The numbers that define a Qwen2 (or bias-free Llama) model, read from and written to a Hugging Face `config.json`.

The file's keys one by one are in `hf_config.py`. There is no JAX here: planning and rollout hosts read it too.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from empo2_jax.errors import ConfigError
from empo2_jax.models.hf_config import HfConfig, Rope
from empo2_jax.readers import read_json, shaped

LARGEST_HEAD = 65_536


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts; a kind uses the fields it needs."""

    kind: str  # linear, llama3 or yarn
    factor: float
    original_max_position_embeddings: int = 0  # tokens, llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn, rotations
    beta_slow: float = 1.0  # yarn, rotations
    attention_factor: float | None = None  # yarn; None = 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the ramp's bounds to whole dimensions


@dataclass(frozen=True)
class Qwen2Config:
    """Architecture of one model; sizes in elements, lengths in tokens."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = True  # biases of q, k and v; False is a Llama
    max_position_embeddings: int = 32_768
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    max_window_layers: int = 0  # layers from this one on use the window
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if not 2 <= self.head_dim <= LARGEST_HEAD or self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim}: rotary embeddings need an even one from 2 to {LARGEST_HEAD}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window {self.sliding_window} must be at least 1")

    def window(self, layer: int) -> int | None:
        """Attention window of a layer in tokens, `None` for full attention."""
        return self.sliding_window if layer >= self.max_window_layers else None

    def differences(self, other: "Qwen2Config") -> list[tuple[str, Any, Any]]:
        """What keeps weights of `other` from being this model's: name, value here, value there."""
        theirs = asdict(other)
        pairs = [(name, value, theirs[name]) for name, value in asdict(self).items() if name != "initializer_range"]
        return [(name, value, found) for name, value, found in pairs if value != found]

    @property
    def num_parameters(self) -> int:
        """Number of trainable values."""
        d, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = 2 * d * q + 2 * d * kv + 3 * d * self.intermediate_size + 2 * d + self.attention_bias * (q + 2 * kv)
        return self.num_layers * layer + d + (1 if self.tie_embeddings else 2) * self.vocab_size * d

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], where: str = "config.json") -> "Qwen2Config":
        """Read a `config.json`; raises ConfigError with `where` and the key that cannot be honored."""
        hf: HfConfig = shaped(dict(values), HfConfig, where, ConfigError)
        llama = hf.model_type == "llama"
        try:
            theta, scaling = _read_rope(hf)
            window, first = (None, 0) if llama else _read_window(hf)
            return cls(
                vocab_size=hf.vocab_size,
                hidden_size=hf.hidden_size,
                num_layers=hf.num_hidden_layers,
                num_heads=hf.num_attention_heads,
                num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
                head_dim=hf.head_dim or hf.hidden_size // hf.num_attention_heads,
                intermediate_size=hf.intermediate_size,
                rope_theta=theta,
                rms_norm_eps=hf.rms_norm_eps,
                tie_embeddings=hf.tie_word_embeddings,
                attention_bias=not llama,
                max_position_embeddings=hf.max_position_embeddings or (2_048 if llama else 32_768),
                rope_scaling=scaling,
                sliding_window=window,
                max_window_layers=first,
                initializer_range=hf.initializer_range,
            )
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that makes transformers (4 and 5) compute the same; inverse of `from_hf`."""
        kind, name = ("qwen2", "Qwen2ForCausalLM") if self.attention_bias else ("llama", "LlamaForCausalLM")
        hf: dict[str, Any] = {
            "architectures": [name],
            "model_type": kind,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
        }
        if self.rope_scaling is not None:
            hf["rope_scaling"] = _write_scaling(self.rope_scaling)
        if self.attention_bias:
            hf["use_sliding_window"] = self.sliding_window is not None
            hf["sliding_window"] = self.sliding_window
            hf["max_window_layers"] = self.max_window_layers
        else:
            hf |= {"attention_bias": False, "mlp_bias": False}
        return hf


def rope_frequencies(config: Qwen2Config) -> tuple[Float64[np.ndarray, " half"], float]:
    """Inverse frequencies (radians per token) of the `head_dim / 2` rotary pairs and the factor on cos and sin."""
    dim, scaling = config.head_dim, config.rope_scaling
    plain = config.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        rotations = scaling.original_max_position_embeddings * plain / (2 * np.pi)
        keep = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return plain * (keep + (1 - keep) / scaling.factor), 1.0
    low, high = (_yarn_dimension(config, rotations) for rotations in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    stretch = scaling.attention_factor
    if stretch is None:
        stretch = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return plain * (1 - ramp + ramp / scaling.factor), stretch


def _yarn_dimension(config: Qwen2Config, rotations: float) -> float:
    """Dimension whose pair turns `rotations` times over the original context (YaRN, arXiv 2309.00071, eq. 21)."""
    assert config.rope_scaling is not None
    length = config.rope_scaling.original_max_position_embeddings
    return config.head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))


def _read_rope(hf: HfConfig) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = hf.rope_parameters or hf.rope_scaling or Rope()
    theta = rope.rope_theta or hf.rope_theta
    if rope.kind == "default" or rope.factor is None:
        return theta, None
    names = {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "truncate"}
    given = rope.model_dump(include=names)
    if rope.kind != "linear":
        original = rope.original_max_position_embeddings or hf.max_position_embeddings
        if original is None:
            raise ConfigError(f"rope_scaling of type {rope.kind!r} needs original_max_position_embeddings")
        given["original_max_position_embeddings"] = original
    return theta, RopeScaling(kind=rope.kind, factor=rope.factor, **given)


def _write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    used = {
        "linear": (),
        "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    }[scaling.kind]
    values = asdict(scaling)
    kept = {name: values[name] for name in used if values[name] is not None}
    return {"rope_type": scaling.kind, "factor": scaling.factor, **kept}


def _read_window(hf: HfConfig) -> tuple[int | None, int]:
    """Window and the first layer that uses it; `layer_types` wins over `max_window_layers` as in transformers."""
    layers, first, types = hf.num_hidden_layers, hf.max_window_layers, hf.layer_types
    if not hf.use_sliding_window or hf.sliding_window is None:
        return None, 0
    if types is not None:
        first = types.index("sliding_attention") if "sliding_attention" in types else layers
        if types != ("full_attention",) * first + ("sliding_attention",) * (layers - first):
            raise ConfigError("layer_types must be full_attention layers followed by sliding_attention layers")
    return hf.sliding_window, min(first, layers)


def read_config(folder: Path) -> Qwen2Config:
    """Architecture of a folder; raises DataError (no file, no JSON) or ConfigError (a key that cannot be honored)."""
    path = Path(folder) / "config.json"
    return Qwen2Config.from_hf(read_json(path, dict[str, Any]), str(path))
