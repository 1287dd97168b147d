"""Paged attention that verifies draft trees, prefill chunks and single tokens in one call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..backend import interpret_mode, resolve_backend
from .limits import check_limits
from .reference import tree_paged_attention_reference
from .tuning import choose_blocks

__all__ = ["kv_pages_shape", "tree_paged_attention"]


def kv_pages_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike
) -> tuple[int, ...]:
    """Shape of `kv_pages` for one layer. The layout is the kernels' own: treat it as opaque."""
    del dtype  # packed layouts depend on it; this one doesn't
    return (2, num_pages, num_kv_heads, page_size, head_dim)


def tree_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    ancestors: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Writes the step's keys and values into their pages, then attends.

    A token sees all tokens of its sequence cached before the step, and of the step's tokens of its own sequence
    those whose bit is set in its ancestors, itself included: bit j of word w is token 32 * w + j of that
    sequence's step. Ancestors of all ones in both words mark a token of a prefill chunk of any length, which
    sees the step's tokens up to itself.

    Args:
        q: [T, Hq, D] queries of the step's tokens, sequence after sequence; rotated.
        k: [T, Hk, D] keys; rotated. Hk divides Hq.
        v: [T, Hk, D] values.
        kv_pages: one layer's cache, of `kv_pages_shape`. Donate it: the result replaces it.
        kv_lens: int32[S], tokens of each sequence, the step's included.
        page_table: int32[S, P], pages of each sequence in order.
        cu_q_lens: int32[S + 1], where each sequence's tokens start in T; ascending.
        ancestors: uint32[T, 2].
        num_seqs: int32[1], how many of the S sequences are in use. Tokens behind theirs are ignored.
        scale: multiplies q @ k.
        sliding_window: a token sees only this many positions, itself included.
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
        sinks: float[Hq], a score per head that takes part in the softmax without a value.
        k_scale, v_scale: float32[Hk] or one number, what a stored 1 of an int8 or fp8 cache is worth; a cache of more
            bits is not scaled.
        backend: "reference", "pallas" (compiled for a TPU; on a CPU in Pallas's TPU interpret mode, for tests), or
            "auto", which is "pallas" where jax runs on a TPU.

    Returns:
        (out [T, Hq, D] in q's dtype, kv_pages). Rows of `out` behind the last token in use are arbitrary.

    Raises:
        ValueError: the head counts don't fit together, or the backend is unknown.
        KernelLimitError: the Pallas kernel doesn't support these sizes or types.
    """
    chosen = resolve_backend(backend)
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the number of query heads must be a multiple of the KV heads; got {q.shape[1]} and {k.shape[1]}"
        )
    num_kv_heads = k.shape[1]
    if jnp.dtype(kv_pages.dtype).itemsize > 1 and not (k_scale is None and v_scale is None):
        raise ValueError(
            f"k_scale and v_scale are for caches of 8 bits; got a cache of {kv_pages.dtype}: leave them out"
        )
    key_scale, value_scale = (
        jnp.broadcast_to(jnp.asarray(1.0 if given is None else given, jnp.float32), (num_kv_heads,))
        for given in (k_scale, v_scale)
    )
    if chosen == "pallas":
        check_limits(q, k, kv_pages, page_table, scale=scale)
        from .pallas import (
            tree_paged_attention_pallas,  # Pallas takes a while to import, and a CPU never needs it
        )

        return tree_paged_attention_pallas(
            q,
            (k, v),
            kv_pages,
            kv_lens,
            page_table,
            cu_q_lens,
            ancestors,
            num_seqs,
            sinks,
            key_scale,
            value_scale,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            value_dim=q.shape[2],
            blocks=choose_blocks(
                tokens_per_sequence=-(-q.shape[0] // page_table.shape[0]),
                num_heads=q.shape[1],
                num_kv_heads=num_kv_heads,
                page_bytes=2 * num_kv_heads * kv_pages.shape[3] * q.shape[2] * kv_pages.dtype.itemsize,
                page_size=kv_pages.shape[3],
                pages_per_sequence=page_table.shape[1],
            ),
            interpret=interpret_mode(),
        )
    return tree_paged_attention_reference(
        q,
        k,
        v,
        kv_pages,
        kv_lens,
        page_table,
        cu_q_lens,
        ancestors,
        num_seqs,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=key_scale,
        v_scale=value_scale,
    )
