"""The section of the text world, `[env]`: which one, how it is played, what it is made of."""

from typing import Literal

from pydantic import Field, model_validator

from empo2_jax.config_base import NonNegative, Positive, Section


class EnvConfig(Section):
    """The text world."""

    name: str = Field("toy", description="module of empo2_jax/envs or a dotted path to one outside")
    tasks: tuple[str, ...] = Field((), strict=False, description="task names or ids; empty = the environment's default")
    train_variations: Positive = Field(5, description="first variations of the train split that are trained on")
    step_limit: Positive = Field(30, description="actions per episode, exactly")
    simplification: str = Field("", description="ScienceWorld simplifications, for example `easy`")
    deterministic: bool = Field(False, description="ScienceWorld: same actions, same transcript, over processes")
    resolution: Literal["ours", "released-code"] = Field("ours", description="rule that maps text to an action")
    examples: int = Field(0, ge=0, description="ScienceWorld: worked examples of the same task in the first turn")
    workers: Positive = Field(2, description="environments stepped at the same time (threads)")
    step_timeout_s: float = Field(60.0, gt=0, description="seconds after which a call of the simulator has failed")
    data: str = Field(
        "",
        description="WebShop: data folder or product file; empty = a synthetic catalogue. ALFWorld: data folder; "
        "empty = $ALFWORLD_DATA",
    )
    products: Positive = Field(400, description="WebShop: products of the synthetic catalogue")
    nouns: Literal["rules", "spacy"] = Field("rules", description="WebShop: how nouns of titles are found")
    invalid_penalty: NonNegative = Field(0.0, description="WebShop: points off the reward for a refused action")

    @model_validator(mode="after")
    def _check(self) -> "EnvConfig":
        default = type(self).model_fields["products"].default
        if self.data and self.products != default:
            raise ValueError(
                f"env.data = {self.data!r} with env.products = {self.products}, the size of the synthetic catalogue "
                f"that stands in where there is no data; with data, {default} (the default) is allowed"
            )
        return self
