"""The names and shapes are those of the model."""

import dataclasses

import pytest
from flax import nnx

from empo2_jax.models.hf_weights import named
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.tensor_names import tensor_shapes
from tests.fixtures.published import CONFIG


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_names_shapes_and_their_order_are_those_of_the_model(tied: bool, bias: bool) -> None:
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, attention_bias=bias)
    state = nnx.state(nnx.eval_shape(lambda: Qwen2(config, rngs=nnx.Rngs(0))), nnx.Param)
    assert tensor_shapes(config) == {name: variable.shape for name, variable in named(state).items()}
    sizes = [variable.size for variable in named(state).values()]
    assert sum(sizes) == config.num_parameters
