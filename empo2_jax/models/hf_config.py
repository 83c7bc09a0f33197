"""The JSON files of a Hugging Face folder beside its weights as they stand there: the keys that are read here.

Every key that changes what the model computes is honored or refused by name; others are ignored. A key that is null is
one that is not there. What the numbers mean together is `qwen2_config.py`'s.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
Base = Annotated[float, Field(gt=1)]  # of rotary frequencies: their logarithm is divided by
One = Annotated[float, Field(ge=1, le=1)]
Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[tuple[Id | None, ...], Field(strict=False)]


class Keys(BaseModel):
    """What the parts of these files have in common."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_nothing(cls, values: Any) -> Any:
        return (
            {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
        )


class Rope(Keys):
    """`rope_parameters` (transformers 5) or `rope_scaling` (before)."""

    rope_theta: Base | None = None
    rope_type: Literal["default", "linear", "llama3", "yarn"] | None = None
    type: Literal["default", "linear", "llama3", "yarn"] | None = None  # its name in old files
    factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    truncate: bool = True
    partial_rotary_factor: One = 1.0
    mscale: None = None
    mscale_all_dim: None = None

    @property
    def kind(self) -> str:
        """How frequencies are stretched."""
        return self.rope_type or self.type or "default"

    @model_validator(mode="after")
    def _check(self) -> "Rope":
        if self.kind != "default" and self.factor is None:
            raise ValueError(f"rope_scaling of type {self.kind!r} needs a number `factor`")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor}: less than high_freq_factor = {self.high_freq_factor} is "
                "allowed"
            )
        return self


class HfConfig(Keys):
    """`config.json` of a model that this package computes."""

    model_type: Literal["qwen2", "llama"]
    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: int = Field(ge=1, le=10_000)
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count
    rope_theta: Base = 10_000.0
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: Count | None = None
    initializer_range: Positive = 0.02
    use_sliding_window: bool = False
    sliding_window: Count | None = None
    max_window_layers: int = Field(28, ge=0, lt=2**31)
    layer_types: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    attention_bias: bool | None = None  # of a Llama; a Qwen2 always has them
    hidden_act: Literal["silu"] = "silu"
    mlp_bias: Literal[False] = False
    attention_dropout: float = Field(0.0, ge=0, le=0)
    partial_rotary_factor: One = 1.0
    quantization_config: None = None

    @model_validator(mode="after")
    def _check(self) -> "HfConfig":
        if self.model_type == "llama" and self.attention_bias:
            raise ValueError("attention_bias = True: false is allowed for model_type llama")
        return self


class Stops(Keys):
    """The ids that end an answer, in either file: one or a list."""

    eos_token_id: Annotated[Ids, BeforeValidator(lambda value: value if isinstance(value, list) else [value])] = ()


def _token_text(value: Any) -> Any:
    """A special token is a text, or a table with its `content`."""
    return value["content"] if isinstance(value, dict) and "content" in value else value


def _default_template(value: Any) -> Any:
    """A list of named templates, which may have a default one, becomes that."""
    if not isinstance(value, list) or not all(isinstance(one, dict) and "name" in one for one in value):
        return value
    return next((one.get("template", one) for one in value if one["name"] == "default"), None)


Token = Annotated[str, BeforeValidator(_token_text)]


class TokenizerConfig(Keys):
    """`tokenizer_config.json`."""

    bos_token: Token | None = None
    eos_token: Token | None = None
    pad_token: Token | None = None
    unk_token: Token | None = None
    chat_template: Annotated[str | None, BeforeValidator(_default_template)] = None
