"""The numbers that define a Qwen2 (or bias-free Llama) model, read from and written to a Hugging Face `config.json`.

Every key that changes what the model computes is honored or refused by name; keys that do not (dtype, use_cache, …)
are ignored. This module knows nothing of JAX: planning and rollout hosts read it too.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from empo2_jax.errors import ConfigError

_MODEL_TYPES = ("qwen2", "llama")
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_ONLY = {  # key: the one value this model computes
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


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
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; rotary embeddings need an even one")
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
    def from_hf(cls, hf: Mapping[str, Any]) -> "Qwen2Config":
        """Read a `config.json`; raises ConfigError naming the key that cannot be honored."""
        kind = hf.get("model_type")
        if kind not in _MODEL_TYPES:
            raise ConfigError(f"model_type {kind!r} is not supported; allowed: {', '.join(_MODEL_TYPES)}")
        for key in _REQUIRED:
            if not isinstance(hf.get(key), int):
                raise ConfigError(f"{key} must be an integer in the model's config.json, got {hf.get(key)!r}")
        for key, only in _ONLY.items():
            if hf.get(key, only) != only:
                raise ConfigError(f"{key} = {hf[key]!r} is not supported; allowed: {only!r}")
        if kind == "llama" and hf.get("attention_bias", False):
            raise ConfigError("attention_bias = True is not supported for model_type llama; allowed: False")
        theta, scaling = _read_rope(hf)
        window, first = _read_window(hf) if kind == "qwen2" else (None, 0)
        return cls(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            intermediate_size=hf["intermediate_size"],
            rope_theta=theta,
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            tie_embeddings=hf.get("tie_word_embeddings", False),
            attention_bias=kind == "qwen2",
            max_position_embeddings=hf.get("max_position_embeddings", 32_768 if kind == "qwen2" else 2_048),
            rope_scaling=scaling,
            sliding_window=window,
            max_window_layers=first,
            initializer_range=hf.get("initializer_range", 0.02),
        )

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


def _read_rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise ConfigError(f"rope_scaling type {kind!r} is not supported; allowed: {', '.join(_ROPE_KINDS)}")
    for key, only in (("partial_rotary_factor", 1.0), ("mscale", None), ("mscale_all_dim", None)):
        if rope.get(key) not in (None, only):
            raise ConfigError(f"rope_scaling key {key} = {rope[key]!r} is not supported; allowed: {only!r}")
    if kind == "default":
        return theta, None
    names = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    given: dict[str, Any] = {name: float(rope[name]) for name in names if rope.get(name) is not None}
    if rope.get("truncate") is not None:
        given["truncate"] = bool(rope["truncate"])
    if not isinstance(rope.get("factor"), int | float):
        raise ConfigError(f"rope_scaling of type {kind!r} needs a number `factor`, got {rope.get('factor')!r}")
    original = rope.get("original_max_position_embeddings") or hf.get("max_position_embeddings", 0)
    if kind != "linear":
        given["original_max_position_embeddings"] = original
    return theta, RopeScaling(kind=kind, factor=float(rope["factor"]), **given)


def _write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    used = {
        "linear": (),
        "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    }[scaling.kind]
    values = asdict(scaling)
    kept = {name: values[name] for name in used if values[name] is not None}
    return {"rope_type": scaling.kind, "factor": scaling.factor, **kept}


def _read_window(hf: Mapping[str, Any]) -> tuple[int | None, int]:
    """Window and the first layer that uses it; `layer_types` wins over `max_window_layers` as in transformers."""
    layers = hf["num_hidden_layers"]
    if not hf.get("use_sliding_window", False) or hf.get("sliding_window") is None:
        return None, 0
    first = hf.get("max_window_layers", 28)
    if hf.get("layer_types") is not None:
        types = list(hf["layer_types"])
        first = types.index("sliding_attention") if "sliding_attention" in types else layers
        if types != ["full_attention"] * first + ["sliding_attention"] * (layers - first):
            raise ConfigError("layer_types must be full_attention layers followed by sliding_attention layers")
    return int(hf["sliding_window"]), min(int(first), layers)
