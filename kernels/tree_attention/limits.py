"""What the Pallas kernel of tree attention supports, checked before anything is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rollout_spec.errors import KernelLimitError

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
QUERY_DTYPES = ("bfloat16", "float32")
CACHE_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
SCALAR_BYTES = 768 * 1024
"""Scalar memory that a page table may take; a TPU core has a MiB."""


def check_limits(
    q: jax.Array, k: jax.Array, kv_pages: jax.Array, page_table: jax.Array, *, scale: float
) -> None:
    """Raises KernelLimitError with all limits that a call exceeds."""
    faults = [_not_among("the head dimension", q.shape[2], HEAD_DIMS)]
    faults.append(_not_among("the cache's dtype", jnp.dtype(kv_pages.dtype).name, CACHE_DTYPES))
    _raise("tree attention", faults + _common_faults(q, k, kv_pages, page_table, scale))


def check_latent_limits(
    q: jax.Array, rows: jax.Array, pages: jax.Array, page_table: jax.Array, *, latent_dim: int, scale: float
) -> None:
    """The same for latent attention."""
    faults = [_not_among("the cache's dtype", jnp.dtype(pages.dtype).name, QUERY_DTYPES)]
    if latent_dim % 128:
        faults.append(f"the latent dimension must be a multiple of 128; got {latent_dim}")
    _raise("latent attention", faults + _common_faults(q, rows, pages, page_table, scale))


def _not_among(name: str, value: object, supported: tuple[object, ...]) -> str | None:
    if value in supported:
        return None
    return f"{name} must be one of {', '.join(map(str, supported))}; got {value}"


def _common_faults(
    q: jax.Array, k: jax.Array, pages: jax.Array, page_table: jax.Array, scale: float
) -> list[str | None]:
    faults = [
        _not_among("the page size", pages.shape[3], PAGE_SIZES),
        _not_among("queries' dtype", jnp.dtype(q.dtype).name, QUERY_DTYPES),
        _not_among("keys' and values' dtype", jnp.dtype(k.dtype).name, QUERY_DTYPES),
    ]
    if page_table.size * 4 > SCALAR_BYTES:
        faults.append(
            f"the page table must fit {SCALAR_BYTES:,} bytes of scalar memory; got {page_table.shape[0]} sequences of "
            f"{page_table.shape[1]} pages, {page_table.size * 4:,} bytes: larger pages or fewer sequences need less"
        )
    if not scale > 0:
        faults.append(f"scale must be positive; got {scale}")
    return faults


def _raise(kernel: str, faults: list[str | None]) -> None:
    found = [fault for fault in faults if fault is not None]
    if found:
        raise KernelLimitError(
            f"the Pallas kernel of {kernel} does not support this call: {'; '.join(found)}. "
            "backend='reference' has no such limits"
        )
