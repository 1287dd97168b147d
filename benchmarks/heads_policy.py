"""A small policy with two multi-token-prediction heads, trained together on the language of `heads_language`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from benchmarks.heads_language import STYLES, VOCABULARY_SIZE, Language
from rollout_spec.models import ModelConfig, MTPConfig, Params, apply, init_params
from rollout_spec.training import mtp_losses

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=VOCABULARY_SIZE,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    max_position_embeddings=512,
    mtp=MTPConfig(num_heads=2),
)
HEADS_WEIGHT = 0.3
"""Of the heads' loss beside the trunk's, as in DeepSeek-V3's pretraining."""


@dataclass(frozen=True)
class Schedule:
    """Optimizer steps, texts in each of them, tokens of a text, and the highest learning rate."""

    steps: int = 600
    rows: int = 24
    length: int = 96
    learning_rate: float = 4e-3


def texts(language: Language, rows: int, length: int, generator: np.random.Generator) -> NDArray[np.int32]:
    """int32[rows, length], the styles in turns."""
    return np.stack([language.write(STYLES[row % len(STYLES)], length, generator) for row in range(rows)])


def losses(params: Params, tokens: jax.Array) -> jax.Array:
    """Nats a token of int32[B, T], float32[3]: the trunk's, and each head's."""
    logits = apply(CONFIG, params, tokens[:, :-1])
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    own = jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
    heads = mtp_losses(params, tokens, jnp.ones(tokens.shape, bool), config=CONFIG, train_trunk=True)
    return jnp.concatenate([own[None], heads])


def train(
    language: Language, schedule: Schedule, seed: int = 0, say: Callable[[str], None] = print
) -> Params:
    """The weights after the last step."""
    generator = np.random.default_rng(seed)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, schedule.learning_rate, max(1, schedule.steps // 20), schedule.steps
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01))

    def total(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        parts = losses(params, tokens)
        return parts[0] + HEADS_WEIGHT * jnp.mean(parts[1:]), parts

    def step(params: Params, state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        gradients, parts = jax.grad(total, has_aux=True)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, parts

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params = init_params(CONFIG, seed)
    state = optimizer.init(params)
    started = time.perf_counter()
    for number in range(schedule.steps):
        tokens = texts(language, schedule.rows, schedule.length, generator)
        params, state, parts = compiled(params, state, jnp.asarray(tokens))
        if number % 100 == 0 or number == schedule.steps - 1:
            shown = ", ".join(f"{float(part):.4f}" for part in parts)
            say(f"step {number}: nats of trunk and heads {shown}; {time.perf_counter() - started:.0f} s")
    return params
