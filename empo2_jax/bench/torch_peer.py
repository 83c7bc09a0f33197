"""The peer: torch + transformers on the CPU, used as their documentation says.

The only module that needs PyTorch; the suites name it as text, and only its child process imports it.
"""

import os
from typing import Any

import numpy as np
import torch
import transformers
from jaxtyping import Int32
from torch.nn import functional

from empo2_jax.bench.base import Side
from empo2_jax.bench.shapes import CLIPS, SHAPES, prompts, train_batch, weight
from empo2_jax.bench.train import scalars
from empo2_jax.config import UpdateConfig


def _model(shape: str) -> Any:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = transformers.Qwen2Config(**SHAPES[shape].to_hf())
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    return model


def train(shape: str, rows: int, length: int) -> Side:
    """Forward, backward, clipping and AdamW; the first step warms up and gives the answers."""
    model, settings = _model(shape).train(), UpdateConfig()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
    )
    batch = train_batch(shape, rows, length)
    ids = torch.from_numpy(batch.token_ids).long()
    advantages, denominator, weights = (
        torch.from_numpy(values[:, 1:]) for values in (batch.advantages, batch.denominator_logprobs, batch.token_weight)
    )

    def backward() -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = -functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        logprobs = logprobs.view(rows, -1)
        ratio = torch.exp(logprobs - denominator)
        clipped = ratio.clamp(1 - CLIPS["clip_low"], 1 + CLIPS["clip_high"])
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        loss = torch.where(advantages < 0, loss.clamp(max=-advantages * CLIPS["dual_clip"]), loss)
        total = (weights * loss).sum()
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        return total.detach(), logprobs.detach()

    def descend() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()

    def step() -> None:
        backward()
        descend()

    loss, logprobs = backward()
    # In f64: torch's f32 norm of a matrix as large as an embedding was seen to be 0.1 % too small.
    squares = [parameter.grad.double().square().sum() for parameter in model.parameters()]
    descend()
    answers = {"logprobs": logprobs.numpy().ravel(), **scalars(float(loss), float(sum(squares)) ** 0.5)}
    return Side(step, answer=lambda: answers, work=rows * length)


def _generate(model: Any, ids: Int32[np.ndarray, "B T"], count: int) -> Int32[np.ndarray, "B A"]:
    """`count` greedy tokens after each prompt."""
    given = torch.from_numpy(ids).long()
    with torch.inference_mode():
        done = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
            eos_token_id=None,
        )
    return done[:, ids.shape[1] :].numpy().astype(np.int32)


def decode(shape: str, batch: int, prompt: int, count: int) -> Side:
    """`generate` for a batch of prompts of one length, prefill included."""
    model, ids = _model(shape).eval(), prompts(shape, batch, prompt).first
    sampled = _generate(model, ids, count)
    return Side(lambda: _generate(model, ids, count), answer=lambda: {"ids": sampled}, work=batch * count)


def turns(shape: str, turns: int, prompt: int, growth: int, response: int) -> Side:
    """An episode: `generate` on the whole conversation at every turn."""
    model, (first, observations) = _model(shape).eval(), prompts(shape, 1, prompt, turns, growth - response)
    _generate(model, first, response)
    sampled: list[np.ndarray] = []

    def run() -> None:
        history = first
        sampled.clear()
        for observation in observations:
            sampled.append(_generate(model, history, response))
            history = np.concatenate([history, sampled[-1], observation[None]], axis=1)

    return Side(run, answer=lambda: {"ids": np.concatenate(sampled, axis=1)}, work=turns)
