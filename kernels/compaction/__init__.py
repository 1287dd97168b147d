"""Moves the keys and values of an accepted path to where plain decoding would have put them."""

from __future__ import annotations

import jax

from ..backend import interpret_mode, resolve_backend
from .reference import move_cached_tokens_reference

__all__ = ["move_cached_tokens"]


def move_cached_tokens(
    kv_pages: jax.Array,
    sources: jax.Array,
    destinations: jax.Array,
    page_table: jax.Array,
    *,
    backend: str = "auto",
) -> jax.Array:
    """Copies cached tokens from one position of their sequence to another, in one layer's pages.

    Args:
        kv_pages: one layer's cache, of `kv_pages_shape`. Donate it.
        sources: int32[M], positions in the sequence's slots.
        destinations: int32[M], likewise. Equal to the source, or negative, means: leave alone.
        page_table: int32[M, P], the pages of each entry's sequence.

        backend: "auto", "pallas" or "reference", as for `tree_paged_attention`.

    Returns:
        kv_pages. All sources are read before any destination is written.

    Raises:
        KernelLimitError: the Pallas kernel doesn't support these sizes.
    """
    if resolve_backend(backend) == "reference":
        return move_cached_tokens_reference(kv_pages, sources, destinations, page_table)
    from .pallas import check_limits, move_cached_tokens_pallas  # Pallas takes a while to import

    check_limits(kv_pages, sources)
    return move_cached_tokens_pallas(kv_pages, sources, destinations, page_table, interpret=interpret_mode())
