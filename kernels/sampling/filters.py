"""Exact top-k, top-p and min-p as one threshold a row, found by bisection instead of a sort.

A float32's bits, read as an order-preserving uint32, are built from the highest bit down: after 32 counting
passes the k-th largest logit (or the smallest one inside the top-p mass) is known exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

_SIGN = 0x80000000


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 with the order of float32 `x`."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.uint32)  # -0.0 equals 0.0
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(_SIGN))


def _largest_satisfying(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """Per row, the largest uint32 threshold for which the monotone test `holds(uint32[R]) -> bool[R]` is true."""

    def try_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(_SIGN) >> i.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, found)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros((rows,), jnp.uint32))


def kept_tokens(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Which tokens top-k, then top-p (over what top-k kept, renormalised), then min-p keep.

    Args:
        logits: float32[R, V], penalties and temperature applied.
        top_k: int32[R], 0 for off. Ties with the k-th largest logit are kept.
        top_p: float32[R], 1 for off. The smallest set of largest tokens with at least this mass; ties kept.
        min_p: float32[R], 0 for off. Tokens of at least this share of the largest probability.

    Returns:
        bool[R, V], true for at least one token a row.
    """
    rows, vocabulary = logits.shape
    bits = _ordered_bits(logits)
    k = jnp.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k)
    largest = jnp.max(logits, axis=-1)

    def count_reaches_k(threshold: jax.Array) -> jax.Array:
        return jnp.sum(bits >= threshold[:, None], axis=-1, dtype=jnp.int32) >= k

    in_top_k = bits >= _largest_satisfying(count_reaches_k, rows)[:, None]
    weights = jnp.where(in_top_k, jnp.exp(logits - largest[:, None]), 0.0)
    target = top_p * jnp.sum(weights, axis=-1)

    def mass_reaches_p(threshold: jax.Array) -> jax.Array:
        mass = jnp.sum(jnp.where(bits >= threshold[:, None], weights, 0.0), axis=-1)
        return (mass >= target) & (mass > 0.0)  # the target may round to zero

    top_p_threshold = jnp.where(top_p >= 1.0, jnp.uint32(0), _largest_satisfying(mass_reaches_p, rows))
    in_min_p = logits >= (largest + jnp.log(min_p))[:, None]
    return in_top_k & (bits >= top_p_threshold[:, None]) & in_min_p
