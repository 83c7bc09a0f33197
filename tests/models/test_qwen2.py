"""Parity with transformers, and the identities that tie the packed forward pass to the cached one."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from empo2_jax.config import ModelConfig
from empo2_jax.errors import ConfigError
from empo2_jax.models.qwen2 import REMAT_POLICIES, Qwen2, Qwen2Config, init_cache

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "grouped": {"model_type": "qwen2", "rope_theta": 1e6},
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "full-heads": {"model_type": "qwen2", "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    "yarn": {"model_type": "qwen2", "rope_scaling": YARN},
    "yarn-options": {
        "model_type": "qwen2",
        "rope_scaling": YARN | {"beta_fast": 8, "beta_slow": 2, "attention_factor": 1.3, "truncate": False},
    },
    "window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "window-unused": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 5},
    "llama": {"model_type": "llama", "head_dim": 10, "rope_theta": 5e5},
    "llama-linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama-llama3": {"model_type": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": True},
}
CLASSES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}


def torch_model(hf: dict, seed: int = 0) -> torch.nn.Module:
    config_class, model_class = CLASSES[hf["model_type"]]
    torch.manual_seed(seed)
    model = model_class(config_class(**{key: value for key, value in hf.items() if key != "model_type"})).eval()
    with torch.no_grad():  # larger than the usual start, biases and norms included, so that every part matters
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def hf_name(path: tuple) -> str:
    name = ".".join(str(part) for part in path)
    return name if name.startswith("lm_head") else f"model.{name}"


def jax_model(config: Qwen2Config, tensors: dict[str, np.ndarray]) -> Qwen2:
    model = Qwen2(config, rngs=nnx.Rngs(0))
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    for path, variable in flat:
        variable.set_value(jnp.asarray(tensors[hf_name(path)]))
    nnx.update(model, nnx.from_flat_state(flat))
    return model


def small_model(**changes: object) -> Qwen2:
    return jax_model(Qwen2Config.from_hf(hf := BASE | CASES["grouped"] | changes), numpy_tensors(torch_model(hf)))


def numpy_tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, BASE["vocab_size"], (rows, length)).astype(np.int32)


def row_inputs(ids: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array]:
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return jnp.asarray(ids), jnp.asarray(positions), jnp.ones(ids.shape, jnp.int32)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case: str) -> None:
    hf = BASE | CASES[case]
    peer = torch_model(hf)
    model = jax_model(Qwen2Config.from_hf(hf), numpy_tensors(peer))
    ids = tokens(2, 24)
    weights = np.random.default_rng(1).normal(size=(2, 24, BASE["vocab_size"])).astype(np.float32)

    output = peer(torch.tensor(ids).long()).logits
    (output * torch.tensor(weights)).sum().backward()
    expected = output.detach().numpy()

    def loss(model: Qwen2) -> tuple[jax.Array, jax.Array]:
        logits = model(*row_inputs(ids), remat="full") @ model.head.T
        return jnp.sum(logits * weights), logits

    grads, logits = nnx.jit(nnx.grad(loss, has_aux=True))(model)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    mine = {hf_name(path): np.asarray(variable[...]) for path, variable in nnx.to_flat_state(grads)}
    theirs = {name: parameter.grad.numpy() for name, parameter in peer.named_parameters()}
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        np.testing.assert_allclose(mine[name], gradient, rtol=1e-4, atol=1e-4 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_config_survives_a_round_trip(case: str) -> None:
    config = Qwen2Config.from_hf(BASE | CASES[case])
    assert Qwen2Config.from_hf(config.to_hf()) == config
    stored = CLASSES[CASES[case]["model_type"]][0](**config.to_hf()).to_dict()  # as transformers 5 writes it
    assert Qwen2Config.from_hf(stored) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mistral"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": None}, "vocab_size"),
        (
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
            "layer_types",
        ),
    ],
)
def test_keys_that_change_numbers_are_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Qwen2Config.from_hf(BASE | {"model_type": "qwen2"} | change)


@pytest.mark.parametrize("case", CASES)
def test_number_of_parameters(case: str) -> None:
    config = Qwen2Config.from_hf(BASE | CASES[case])
    params = nnx.state(nnx.eval_shape(lambda: Qwen2(config, rngs=nnx.Rngs(0))), nnx.Param)
    assert config.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_packed_segments_equal_separate_rows_and_padding_is_finite() -> None:
    model = small_model()
    ids = tokens(1, 12)
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0]], np.int32)
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 3], np.int32)
    packed = np.asarray(model(jnp.asarray(ids), jnp.asarray(positions), jnp.asarray(segments)))
    np.testing.assert_allclose(packed[:, :5], model(*row_inputs(ids[:, :5])), atol=1e-5)
    np.testing.assert_allclose(packed[:, 5:9], model(*row_inputs(ids[:, 5:9])), atol=1e-5)
    assert np.isfinite(packed).all()


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_remat_changes_no_value_and_keeps_what_it_says(remat: str) -> None:
    model, ids = small_model(), tokens(2, 8)

    def run(remat: str) -> tuple[jax.Array, int]:
        output, backward = jax.vjp(lambda x: x(*row_inputs(ids), remat=remat), model)
        return output, sum(leaf.nbytes for leaf in jax.tree.leaves(backward))

    (plain, most), (output, kept), (_, least) = run("none"), run(remat), run("full")
    np.testing.assert_array_equal(plain, output)
    assert {"none": kept == most, "dots": least < kept < most, "full": kept == least}[remat]


def test_remat_policies_are_those_of_the_configuration() -> None:
    assert set(get_args(ModelConfig.model_fields["remat"].annotation)) == set(REMAT_POLICIES)


@pytest.mark.parametrize("window", [None, 3])
def test_extend_equals_forward(window: int | None) -> None:
    model = small_model(use_sliding_window=window is not None, sliding_window=window, max_window_layers=1)
    ids = tokens(3, 16)
    expected = jax.nn.log_softmax(model(*row_inputs(ids)) @ model.head.T)
    extend = nnx.jit(Qwen2.extend, static_argnames="width")
    cache = init_cache(model.config, 3, 16)
    lengths = np.zeros(3, np.int32)
    got = np.zeros_like(expected)
    for counts in ([5, 2, 0], [4, 4, 4], [1, 1, 1], [6, 5, 0], [0, 4, 5], [0, 0, 6]):  # the last ones touch the end
        block = np.full((3, max(counts)), 60, np.int32)
        for slot, count in enumerate(counts):
            block[slot, :count] = ids[slot, lengths[slot] : lengths[slot] + count]
        hidden, cache = extend(
            model, cache, jnp.asarray(block), jnp.asarray(lengths), jnp.asarray(counts, jnp.int32), width=16
        )
        logprobs = np.asarray(jax.nn.log_softmax(hidden @ model.head.T))
        for slot, count in enumerate(counts):
            got[slot, lengths[slot] : lengths[slot] + count] = logprobs[slot, :count]
        lengths += np.array(counts, np.int32)
    assert lengths.tolist() == [16, 16, 16]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_lowering_a_length_rolls_a_slot_back() -> None:
    model = small_model()
    cache = init_cache(model.config, 1, 8)

    def extend(cache: object, ids: list[int], length: int) -> tuple[jax.Array, object]:
        counts = jnp.asarray([len(ids)], jnp.int32)
        return model.extend(cache, jnp.asarray([ids], jnp.int32), jnp.asarray([length], jnp.int32), counts, width=8)

    _, cache = extend(cache, [1, 2, 3, 4, 5], 0)
    detour, _ = extend(cache, [9, 8], 2)
    straight = model(*row_inputs(np.array([[1, 2, 9, 8]], np.int32)))
    np.testing.assert_allclose(detour, straight[:, 2:], atol=1e-5)


def test_decoding_inside_a_loop_equals_greedy_search_by_forward() -> None:
    model = small_model()
    prompt = tokens(2, 4)

    @nnx.jit
    def decode(model: Qwen2, cache: object, last: jax.Array) -> jax.Array:
        def body(state: tuple) -> tuple:
            step, token, cache, out = state
            lengths = jnp.full((2,), 4 + step, jnp.int32)
            hidden, cache = model.extend(cache, token[:, None], lengths, jnp.ones(2, jnp.int32), width=12)
            token = jnp.argmax(hidden[:, 0] @ model.head.T, axis=-1).astype(jnp.int32)
            return step + 1, token, cache, out.at[:, step].set(token)

        state = (jnp.int32(0), last, cache, jnp.zeros((2, 5), jnp.int32))
        return jax.lax.while_loop(lambda state: state[0] < 5, body, state)[3]

    zeros, full = jnp.zeros(2, jnp.int32), jnp.full((2,), 4, jnp.int32)
    hidden, cache = model.extend(init_cache(model.config, 2, 12), jnp.asarray(prompt), zeros, full, width=4)
    first = jnp.argmax(hidden[:, 3] @ model.head.T, axis=-1).astype(jnp.int32)
    ids = np.concatenate([prompt, np.asarray(first)[:, None]], axis=1)
    for _ in range(5):
        following = jnp.argmax(model(*row_inputs(ids))[:, -1] @ model.head.T, axis=-1)
        ids = np.concatenate([ids, np.asarray(following, np.int32)[:, None]], axis=1)
    np.testing.assert_array_equal(decode(model, cache, first), ids[:, 5:])


def test_bf16_compute_stays_close_and_parameters_stay_f32() -> None:
    wide = small_model()
    narrow = Qwen2(wide.config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    nnx.update(narrow, nnx.state(wide, nnx.Param))
    inputs = row_inputs(tokens(2, 8))
    hidden = narrow(*inputs)
    assert hidden.dtype == jnp.bfloat16
    assert narrow.head.dtype == jnp.float32
    np.testing.assert_allclose(hidden.astype(jnp.float32), wide(*inputs), atol=0.25)
