"""Moves the keys and values of an accepted path to where plain decoding would have put them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["move_cached_tokens"]


def move_cached_tokens(
    kv_pages: jax.Array, sources: jax.Array, destinations: jax.Array, page_table: jax.Array
) -> jax.Array:
    """Copies cached tokens from one position of their sequence to another, in one layer's pages.

    Args:
        kv_pages: one layer's cache, of `kv_pages_shape`. Donate it.
        sources: int32[M], positions in the sequence's slots.
        destinations: int32[M], likewise. Equal to the source, or negative, means: leave alone.
        page_table: int32[M, P], the pages of each entry's sequence.

    Returns:
        kv_pages. All sources are read before any destination is written.
    """
    _, num_pages, num_heads, page_size, head_dim = kv_pages.shape
    flat = kv_pages.reshape(-1, head_dim)

    def rows(positions: jax.Array) -> jax.Array:
        page = jnp.take_along_axis(page_table, (positions // page_size)[:, None], axis=1, mode="clip")
        row = (page * num_heads + jnp.arange(num_heads)[None, :]) * page_size + (positions % page_size)[
            :, None
        ]
        return jnp.concatenate([row, row + num_pages * num_heads * page_size])  # [2 M, Hk]

    moves = (destinations >= 0) & (destinations != sources)
    target = jnp.where(jnp.tile(moves, 2)[:, None], rows(jnp.maximum(destinations, 0)), flat.shape[0])
    moved = jnp.take(flat, rows(sources).reshape(-1), axis=0, mode="clip")
    return flat.at[target.reshape(-1)].set(moved, mode="drop", unique_indices=True).reshape(kv_pages.shape)
