"""A handful of tiny random models, between them every option of both families, each with its plain twin."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax

from rollout_spec.models import ModelConfig, Params, RopeConfig, init_params
from rollout_spec.weights.names import to_hf
from tests.helpers.plain_model import PlainModel

CONFIGS: dict[str, ModelConfig] = {
    # One block of the vocabulary; heads wider together than the model.
    "llama": ModelConfig(
        architecture="llama",
        vocab_size=41,
        hidden_size=16,
        intermediate_size=24,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        max_position_embeddings=96,
        eos_token_ids=(3,),
    ),
    # Three blocks, the last one part full; tied head, every bias a Llama may have, grouped queries.
    "llama-tied": ModelConfig(
        architecture="llama",
        vocab_size=600,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope=RopeConfig(theta=500.0),
        tie_word_embeddings=True,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        eos_token_ids=(7, 599),
    ),
    # Two blocks, the second of a single token; one key head for all.
    "qwen2": ModelConfig(
        architecture="qwen2",
        vocab_size=257,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=96,
        attention_bias=True,
        eos_token_ids=(256, 0),
    ),
    "qwen2-tied": ModelConfig(
        architecture="qwen2",
        vocab_size=300,
        hidden_size=24,
        intermediate_size=32,
        num_layers=1,
        num_heads=6,
        num_kv_heads=3,
        head_dim=4,
        max_position_embeddings=96,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=True,
        eos_token_ids=(9,),
    ),
}

# Factors on the usual random weights that make attention choose and distributions of every sharpness.
_GAINS = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 1.5, "down_proj": 1.5, "embed_tokens": 2.0, "lm_head": 3.0}


@dataclass(frozen=True, eq=False)
class TinyModel:
    """One config with one set of random float32 weights, for the engine and for the plain loop."""

    config: ModelConfig
    params: Params
    plain: PlainModel


def random_params(config: ModelConfig, seed: int) -> Params:
    def scaled(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        module, kind = str(path[-2].key), str(path[-1].key)
        return leaf if kind == "bias" else leaf * _GAINS.get(module, 1.0)

    return jax.tree_util.tree_map_with_path(scaled, init_params(config, seed))


@functools.cache
def tiny_model(name: str, seed: int = 0, max_length: int | None = None) -> TinyModel:
    """max_length: where the plain loop ends a sequence, if before the model's own maximum, in tokens."""
    config = CONFIGS[name]
    params = random_params(config, seed)
    plain = PlainModel(config, to_hf(config, params), max_length or config.max_length)
    return TinyModel(config, params, plain)
