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
    faults = []

    def check(name: str, value: object, supported: tuple[object, ...]) -> None:
        if value not in supported:
            faults.append(f"{name} must be one of {', '.join(map(str, supported))}; got {value}")

    check("the head dimension", q.shape[2], HEAD_DIMS)
    check("the page size", kv_pages.shape[3], PAGE_SIZES)
    check("queries' dtype", jnp.dtype(q.dtype).name, QUERY_DTYPES)
    check("keys' and values' dtype", jnp.dtype(k.dtype).name, QUERY_DTYPES)
    check("the cache's dtype", jnp.dtype(kv_pages.dtype).name, CACHE_DTYPES)
    if page_table.size * 4 > SCALAR_BYTES:
        faults.append(
            f"the page table must fit {SCALAR_BYTES:,} bytes of scalar memory; got {page_table.shape[0]} sequences of "
            f"{page_table.shape[1]} pages, {page_table.size * 4:,} bytes: larger pages or fewer sequences need less"
        )
    if not scale > 0:
        faults.append(f"scale must be positive; got {scale}")
    if faults:
        raise KernelLimitError(
            f"the Pallas kernel of tree attention does not support this call: {'; '.join(faults)}. "
            "backend='reference' has no such limits"
        )
