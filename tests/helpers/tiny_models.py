"""A handful of tiny random models, between them every option of the families, each with its plain twin."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax

from rollout_spec.models import ExpertsConfig, LatentConfig, ModelConfig, Params, RopeConfig, init_params
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
    "mistral": ModelConfig(
        architecture="mistral",
        vocab_size=60,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=96,
        windows=(7, 7),
        eos_token_ids=(3,),
    ),
    "qwen3": ModelConfig(
        architecture="qwen3",
        vocab_size=270,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=96,
        qk_norm=True,
        eos_token_ids=(2, 260),
    ),
    "gemma2": ModelConfig(
        architecture="gemma2",
        vocab_size=90,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=96,
        activation="gelu_tanh",
        windows=(5, None),
        query_scale=12.0,
        attention_soft_cap=4.0,
        logit_soft_cap=8.0,
        norm_offset=True,
        output_norms=True,
        scaled_embedding=True,
        tie_word_embeddings=True,
        eos_token_ids=(1,),
    ),
    "gemma3": ModelConfig(
        architecture="gemma3",
        vocab_size=90,
        hidden_size=16,
        intermediate_size=24,
        num_layers=3,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=96,
        activation="gelu_tanh",
        windows=(4, 9, None),
        windowed_rope=RopeConfig(theta=300.0),
        query_scale=8.0,
        qk_norm=True,
        norm_offset=True,
        output_norms=True,
        scaled_embedding=True,
        tie_word_embeddings=True,
        eos_token_ids=(1,),
    ),
    "qwen3_moe": ModelConfig(
        architecture="qwen3_moe",
        vocab_size=80,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=96,
        qk_norm=True,
        experts=ExpertsConfig(8, 2, 12, layers=(0, 1), normalised=True),
        eos_token_ids=(2,),
    ),
    "deepseek_v2": ModelConfig(
        architecture="deepseek_v2",
        vocab_size=80,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=1,
        head_dim=10,
        max_position_embeddings=96,
        latent=LatentConfig(query_rank=None, kv_rank=12, nope_dim=6, rope_dim=4, value_dim=8),
        experts=ExpertsConfig(8, 3, 12, layers=(1,), scale=1.5, shared_intermediate_size=24),
        eos_token_ids=(2,),
    ),
    "deepseek_v3": ModelConfig(
        architecture="deepseek_v3",
        vocab_size=80,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=1,
        head_dim=10,
        max_position_embeddings=96,
        latent=LatentConfig(query_rank=12, kv_rank=12, nope_dim=6, rope_dim=4, value_dim=8),
        experts=ExpertsConfig(
            8,
            2,
            12,
            layers=(1,),
            scoring="sigmoid",
            normalised=True,
            scale=2.5,
            correction_bias=True,
            num_groups=4,
            chosen_groups=2,
            group_score_of=2,
            shared_intermediate_size=12,
        ),
        eos_token_ids=(2,),
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
