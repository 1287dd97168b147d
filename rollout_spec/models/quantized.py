"""Matrices of 8 bits with a scale for each output channel, and multiplying by them.

What is stored is `kernel / scale`, rounded; the largest number of a channel gets the largest of the 8-bit type. A
product is computed with the 8-bit numbers in the type of the activations, which holds every one of them exactly, summed
in float32 and multiplied by the scales then, so that quantising costs precision once, when weights are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WEIGHT_TYPES: dict[str, Any] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""By the names that `EngineConfig.weight_dtype` and `cache_dtype` take."""

QUANTIZED_MODULES = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
)
"""Modules whose kernels are stored so: projections and experts, those of multi-token-prediction heads too."""


class QuantizedArray(NamedTuple):
    """A kernel [..., in, out] in 8 bits; a node of the params tree in the kernel's place."""

    values: Any
    """int8 or float8_e4m3fn [..., in, out]."""
    scale: Any
    """float32[..., out]: what a stored 1 of each output channel is worth."""
    sums: Any
    """uint32[2]: `weights.checksums.sums_of` the kernel it was made from."""

    @property
    def nbytes(self) -> int:
        """Over all three."""
        return self.values.nbytes + self.scale.nbytes + self.sums.nbytes


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedArray)


def leaves_of(params: Any) -> list[Any]:
    """The leaves of a params tree in their order, a quantised kernel as one."""
    return jax.tree.leaves(params, is_leaf=is_quantized)


def is_to_be_quantized(keys: Iterable[Any]) -> bool:
    """Whether the leaf of that path, of names, is a kernel that quantised weights store in 8 bits."""
    *_, module, leaf = map(str, keys)
    return leaf == "kernel" and module in QUANTIZED_MODULES


def largest(dtype: Any) -> float:
    """The largest number of an 8-bit type that is used; int8's are symmetric."""
    return 127.0 if jnp.issubdtype(dtype, jnp.integer) else float(jnp.finfo(dtype).max)


def quantize(kernel: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Values [..., in, out] of `dtype` and scales float32[..., out] of a kernel [..., in, out].

    Scales have 17 bits, so that float32 holds every product of a value and its scale: quantising what was multiplied
    out gives the same again. A channel of zeros has scale 1. Numbers that are not finite make their channel's scale
    not finite, and so are not hidden.
    """
    wide = kernel.astype(jnp.float32)
    reach = jnp.max(jnp.abs(wide), axis=-2)
    # Channels so small that their scale would lose bits, or be 0, count as zeros.
    # Multiplied by the reciprocal: XLA's own divisions by a constant are not rounded alike everywhere.
    share = reach * np.float32(1 / largest(dtype))
    scale = _rounded_down(jnp.where(reach > jnp.finfo(jnp.float32).tiny * largest(dtype), share, 1.0))
    scaled = wide / scale[..., None, :]
    if jnp.issubdtype(dtype, jnp.integer):
        scaled = jnp.round(scaled)
    return jnp.clip(scaled, -largest(dtype), largest(dtype)).astype(dtype), scale


def _rounded_down(scale: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFFF80), jnp.float32)


def dense(leaf: Any, dtype: Any) -> Any:
    """What a leaf stands for: a quantised kernel multiplied out in `dtype`, by jax or numpy as it is; else itself."""
    if not is_quantized(leaf):
        return leaf
    if isinstance(leaf.values, np.ndarray):
        return (leaf.values.astype(np.float32) * leaf.scale[..., None, :]).astype(dtype)
    return _multiplied_out(np.dtype(dtype))(leaf.values, leaf.scale)


@functools.lru_cache(maxsize=16)
def _multiplied_out(dtype: np.dtype) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return jax.jit(lambda values, scale: (values.astype(jnp.float32) * scale[..., None, :]).astype(dtype))


def multiply(inputs: jax.Array, kernel: Any, precision: Callable[[Any], jax.lax.Precision]) -> jax.Array:
    """inputs [..., in] @ kernel [in, out], which may be quantised, in the inputs' dtype.

    precision: of a product, by the type that it is computed in.
    """
    if not is_quantized(kernel):
        return jnp.matmul(inputs, kernel, precision=precision(kernel.dtype))
    products = jnp.matmul(
        inputs,
        kernel.values.astype(inputs.dtype),
        precision=precision(inputs.dtype),
        preferred_element_type=jnp.float32,
    )
    return (products * kernel.scale).astype(inputs.dtype)
