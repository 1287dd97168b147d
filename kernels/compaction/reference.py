"""Moving cached tokens in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def move_cached_tokens_reference(
    kv_pages: jax.Array, sources: jax.Array, destinations: jax.Array, page_table: jax.Array
) -> jax.Array:
    """See `rollout_spec.kernels.move_cached_tokens`."""
    planes, num_pages, num_heads, page_size, head_dim = kv_pages.shape
    flat = kv_pages.reshape(-1, head_dim)

    def rows(positions: jax.Array) -> jax.Array:
        page = jnp.take_along_axis(page_table, (positions // page_size)[:, None], axis=1, mode="clip")
        row = (page * num_heads + jnp.arange(num_heads)[None, :]) * page_size + (positions % page_size)[
            :, None
        ]
        plane_size = num_pages * num_heads * page_size
        return jnp.concatenate([row + plane * plane_size for plane in range(planes)])  # [planes M, Hk]

    moves = (destinations >= 0) & (destinations != sources)
    target = jnp.where(jnp.tile(moves, planes)[:, None], rows(jnp.maximum(destinations, 0)), flat.shape[0])
    moved = jnp.take(flat, rows(sources).reshape(-1), axis=0, mode="clip")
    return flat.at[target.reshape(-1)].set(moved, mode="drop", unique_indices=True).reshape(kv_pages.shape)
