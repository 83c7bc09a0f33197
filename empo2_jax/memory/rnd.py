"""Novelty by random network distillation (arXiv 1810.12894): the paper's ablation of the count-based reward.

A state is novel as far as a predictor, trained on the states that were visited, misses a fixed random network's answer:
r = coefficient · ‖g(s) − f(s)‖² / ē, with ē the same for an untrained predictor on random inputs, so that a state
like no other pays about the coefficient. One pair of networks serves all tasks. While an iteration runs nothing
changes; `commit` trains the predictor on its states. Against `novelty.py`: no entries, no threshold, no counts.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from empo2_jax.errors import CheckpointError
from empo2_jax.randomness import generator

HIDDEN, OUT = 64, 32  # units of both networks
BATCH, EPOCHS = 64, 4  # of the states of an iteration
_FILE = "rnd.safetensors"

Weights = dict[str, Float32[np.ndarray, "..."]]


class RandomDistillation:
    """A fixed random network and its predictor; implements `base.Novelty`."""

    def __init__(self, dimension: int, *, coefficient: float, learning_rate: float, seed: int) -> None:
        """Untrained. `coefficient` is in score points; the weights are drawn from `seed`."""
        self._dimension, self._coefficient, self._rate = dimension, coefficient, learning_rate
        self._target, predictor = _draw(dimension, seed, "rnd-target"), _draw(dimension, seed, "rnd-predictor")
        zeros = {name: np.zeros_like(value) for name, value in predictor.items()}
        self._state = _named(predictor, "weights") | _named(zeros, "first") | _named(zeros, "second")
        self._state["counts"] = np.zeros(2, np.float32)  # Adam's updates, states that were learned
        probes = generator(seed, "rnd-probes").standard_normal((256, dimension)).astype(np.float32)
        self._scale = float(self._errors(probes / np.linalg.norm(probes, axis=1, keepdims=True)).mean())

    def episode_rewards(
        self, key: str, embeddings: Float32[np.ndarray, "S D"]
    ) -> tuple[Float32[np.ndarray, " S"], Float32[np.ndarray, "S D"]]:
        """Rewards of the states that the actions of one episode reached, and those states; `key` does not matter."""
        rewards = self._coefficient * self._errors(embeddings) / self._scale
        return rewards.astype(np.float32), embeddings

    def commit(self, pending: Iterable[Float32[np.ndarray, "_ D"]]) -> None:
        """Train the predictor on the states of the iteration's episodes, in episode order."""
        states = np.concatenate([np.zeros((0, self._dimension), np.float32), *pending])
        for _ in range(EPOCHS):
            for start in range(0, len(states), BATCH):
                self._learn(states[start : start + BATCH])
        self._state["counts"][1] += len(states)

    def metrics(self) -> dict[str, int]:
        """How many states the predictor has learned from."""
        return {"states": int(self._state["counts"][1])}

    def dump(self, folder: Path) -> None:
        """Write predictor and optimizer into `folder` (created if needed): the same ones give the same bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_bytes(self._serialized())

    def load(self, folder: Path) -> None:
        """Replace them by dumped ones; raises `CheckpointError` if the file is missing or does not fit."""
        try:
            state = load_file(folder / _FILE)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"no predictor of novelty can be read from {folder}: {error}") from error
        shapes, expected = ({name: value.shape for name, value in s.items()} for s in (state, self._state))
        if shapes != expected:
            raise CheckpointError(f"{folder}/{_FILE} has arrays {shapes}, expected {expected}")
        self._state = state

    def content_hash(self) -> str:
        """SHA-256 of everything that `dump` writes."""
        return hashlib.sha256(self._serialized()).hexdigest()

    def _errors(self, states: Float32[np.ndarray, "S D"]) -> Float32[np.ndarray, " S"]:
        return np.square(_forward(self._weights(), states)[1] - _forward(self._target, states)[1]).sum(axis=1)

    def _weights(self) -> Weights:
        return {name: self._state[f"weights.{name}"] for name in self._target}

    def _learn(self, states: Float32[np.ndarray, "S D"]) -> None:
        """One step of Adam on the mean squared error."""
        self._state["counts"][0] += 1
        grads = gradient(self._weights(), states, _forward(self._target, states)[1])
        for name, grad in grads.items():
            first = self._state[f"first.{name}"] = 0.9 * self._state[f"first.{name}"] + 0.1 * grad
            second = self._state[f"second.{name}"] = 0.999 * self._state[f"second.{name}"] + 0.001 * np.square(grad)
            count = float(self._state["counts"][0])
            change = first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.999**count)) + 1e-8)
            self._state[f"weights.{name}"] = (self._state[f"weights.{name}"] - self._rate * change).astype(np.float32)

    def _serialized(self) -> bytes:
        return save(self._state)


def gradient(
    weights: Weights, states: Float[np.ndarray, "S D"], wanted: Float[np.ndarray, "S O"]
) -> dict[str, Float[np.ndarray, "..."]]:
    """Of mean over states of ‖g(s) − wanted‖², by weight."""
    hidden, answer = _forward(weights, states)
    outer = 2 * (answer - wanted) / len(states)
    inner = outer @ weights["out"].T * (1 - np.square(hidden))
    return {
        "in": states.T @ inner,
        "in_bias": inner.sum(axis=0),
        "out": hidden.T @ outer,
        "out_bias": outer.sum(axis=0),
    }


def _forward(
    weights: Weights, states: Float[np.ndarray, "S D"]
) -> tuple[Float[np.ndarray, "S H"], Float[np.ndarray, "S O"]]:
    """Hidden units and answer."""
    hidden = np.tanh(states @ weights["in"] + weights["in_bias"])
    return hidden, hidden @ weights["out"] + weights["out_bias"]


def _draw(dimension: int, seed: int, purpose: str) -> Weights:
    """Inputs of unit norm give hidden units of about unit variance, so that tanh bends."""
    rng = generator(seed, purpose)
    draws = {"in": (dimension, HIDDEN), "in_bias": (HIDDEN,), "out": (HIDDEN, OUT), "out_bias": (OUT,)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in draws.items()}
    return weights | {"out": weights["out"] / np.float32(np.sqrt(HIDDEN))}


def _named(weights: Weights, prefix: str) -> Weights:
    return {f"{prefix}.{name}": value for name, value in weights.items()}
