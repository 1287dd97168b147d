"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) and its stretched forms.

A head's dimensions d and d + D/2 form a pair ("rotate half"), turned by the angle position * frequency[d].
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from rollout_spec.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each pair of dimensions, in radians: float32 [D/2].

    Computed in float64: an error here grows with the position.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = rope.theta**-exponents
    if rope.kind == "linear":  # position interpolation, https://arxiv.org/abs/2306.15595
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.kind == "yarn":
        frequencies = _yarn(frequencies, rope, head_dim)
    elif rope.kind == "factors":
        frequencies = frequencies / np.asarray(rope.frequency_factors, dtype=np.float64)
    return frequencies.astype(np.float32)  # "default", and "dynamic" within the original context


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """YaRN's correction of the softmax temperature, sqrt(1/t) = 0.1 ln(factor) + 1 (equation 22).

    DeepSeek's checkpoints weigh the logarithm by `mscale` and divide by the same over `mscale_all_dim`.
    """

    def correction(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return correction(mscale) / correction(mscale_all_dim)
    return correction(1.0)


def rotary_table(positions: jax.Array, rope: RopeConfig, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine for `rotate`, once a forward pass: positions int32[T] -> 2 x float32[T, 1, D/2]."""
    angles = positions.astype(jnp.float32)[:, None, None] * inverse_frequencies(rope, head_dim)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(heads: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn queries or keys [T, H, D] by their positions' angles; float32 inside, their dtype outside."""
    cos, sin = table
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(heads.dtype)


def _llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    context = rope.original_max_position_embeddings
    assert context is not None
    turns = context * frequencies / (2 * math.pi)  # over the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(frequencies: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """YaRN (https://arxiv.org/abs/2309.00071), "NTK-by-parts": a linear ramp over the dimensions, between the
    one that turns `beta_fast` times and the one that turns `beta_slow` times over the original context."""
    context = rope.original_max_position_embeddings
    assert context is not None

    def dimension_turning(turns: float) -> float:
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # a step instead of a division by zero
    stretched = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies
