"""The families that can be built, and building them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rollout_spec.errors import ModelLoadError
from rollout_spec.models import deepseek, gemma2, gemma3, llama, mimo, mistral, qwen2, qwen3, qwen3_moe
from rollout_spec.models.config import ModelConfig
from rollout_spec.models.decoder import DecoderModel
from rollout_spec.models.family import Family

Params = dict[Any, Any]
"""Nested dict of arrays as of `nnx.to_pure_dict`: {"embed_tokens": {...}, "layers": {0: {...}, ...}, ...}."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        llama.FAMILY,
        mistral.FAMILY,
        qwen2.FAMILY,
        mimo.FAMILY,
        qwen3.FAMILY,
        qwen3_moe.FAMILY,
        gemma2.FAMILY,
        gemma3.FAMILY,
        deepseek.V2,
        deepseek.V3,
    )
}


def family_of(architecture: str) -> Family:
    """The family of that name; ModelLoadError names the known ones if there is none."""
    if architecture not in FAMILIES:
        raise ModelLoadError(
            f"unknown architecture {architecture!r}: supported are {', '.join(sorted(FAMILIES))} "
            "(docs/models.md says how to add one)"
        )
    return FAMILIES[architecture]


@functools.lru_cache(maxsize=64)
def _split(config: ModelConfig) -> tuple[nnx.GraphDef[DecoderModel], Params]:
    module = family_of(config.architecture).module
    graphdef, state = nnx.split(nnx.eval_shape(lambda: module(config)))
    return graphdef, nnx.to_pure_dict(state)


def build(config: ModelConfig) -> nnx.GraphDef[DecoderModel]:
    """The model without its weights: `nnx.merge(build(config), params)` is a `DecoderModel` (also in jit)."""
    return _split(config)[0]


def abstract_params(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """Names and shapes of the weights: a tree of `jax.ShapeDtypeStruct` of the given dtype."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), _split(config)[1])


def init_params(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> Params:
    """Random weights for tests and for training from nothing, the same on every platform.

    Matrices are normal with variance 1 / fan-in (the embedding: 1 / hidden_size), so that logits have a
    standard deviation near 1 and depend on the context; biases are normal with deviation 0.1; norms multiply by
    numbers around 1.
    """
    generator = np.random.default_rng(seed)

    def draw(path: Iterable[Any], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        kind = list(path)[-1].key
        noise = generator.standard_normal(leaf.shape, dtype=np.float32)
        if kind == "scale":
            values = (0 if config.norm_offset else 1) + 0.1 * noise
        elif kind in ("bias", "e_score_correction_bias"):
            values = 0.1 * noise
        else:
            fan_in = config.hidden_size if kind == "embedding" else leaf.shape[-2]
            values = noise * np.float32(fan_in**-0.5)
        return jnp.asarray(values, dtype=dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


@functools.lru_cache(maxsize=64)
def _apply(config: ModelConfig) -> Callable[..., jax.Array]:
    graphdef = build(config)
    return jax.jit(lambda params, ids, positions: nnx.merge(graphdef, params)(ids, positions))


def apply(
    config: ModelConfig, params: Params, token_ids: jax.Array, positions: jax.Array | None = None
) -> jax.Array:
    """Logits float32[B, T, V] of token_ids int32[B, T]: `DecoderModel.__call__`, jitted, cached by config."""
    return _apply(config)(params, jnp.asarray(token_ids), positions)
