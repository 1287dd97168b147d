"""Keys and values as 8-bit caches store them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LARGEST_INT8 = 127.0


def is_scaled(dtype: jax.typing.DTypeLike) -> bool:
    """Whether a cache of this type stores numbers divided by a scale."""
    return jnp.dtype(dtype).itemsize == 1


def to_page_dtype(values: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`values` as a cache of `dtype` stores them: where it has 8 bits, divided by `scale`, rounded and clipped."""
    if not is_scaled(dtype):
        return values.astype(dtype)
    scaled = values.astype(jnp.float32) / scale
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.round(scaled), -LARGEST_INT8, LARGEST_INT8).astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(scaled, -largest, largest).astype(dtype)
