"""Moving cached tokens on TPU: only the groups of rows that a move touches are read and written.

A page's rows come in tiles, of which one row alone can't be copied: 8 rows of float32, 16 of bf16, 32 of 8 bits. So a
move reads the group around its source, keeps the row in vector memory, and, once all sources are read, puts the row
into the group around its destination. Tokens that are where they belong cost a comparison.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rollout_spec.errors import KernelLimitError

_MOST_ROW_BYTES = 8 << 20
_SMALLEST_PAGE = 16


def check_limits(kv_pages: jax.Array, sources: jax.Array) -> None:
    """Raises KernelLimitError where the rows that are moved, or a page, don't suit vector memory."""
    parts, _, heads, page_size, head_dim = kv_pages.shape
    row_bytes = parts * heads * head_dim * 4
    if sources.shape[0] * row_bytes > _MOST_ROW_BYTES:
        raise KernelLimitError(
            f"move_cached_tokens holds the rows it moves in {_MOST_ROW_BYTES:,} bytes of vector memory; got "
            f"{sources.shape[0]} entries of {row_bytes:,} bytes: pass fewer at a time, or backend='reference'"
        )
    if page_size % _SMALLEST_PAGE:
        raise KernelLimitError(
            f"move_cached_tokens needs a page size that is a multiple of {_SMALLEST_PAGE}; got {page_size}: "
            "use another, or backend='reference'"
        )


def move_cached_tokens_pallas(
    kv_pages: jax.Array,
    sources: jax.Array,
    destinations: jax.Array,
    page_table: jax.Array,
    *,
    interpret: Any = False,
) -> jax.Array:
    """See `rollout_spec.kernels.move_cached_tokens`."""
    parts, _, heads, page_size, head_dim = kv_pages.shape
    group_rows = min(page_size, 32 // kv_pages.dtype.itemsize)
    entries = jnp.arange(sources.shape[0])
    last_page = page_table.shape[1] - 1

    def page_of(positions: jax.Array) -> jax.Array:
        return page_table[entries, jnp.clip(positions // page_size, 0, last_page)]

    moves = (destinations >= 0) & (destinations != sources)
    scalars = [
        moves.astype(jnp.int32),
        page_of(sources),
        sources % page_size,
        page_of(destinations),
        destinations % page_size,
    ]
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, group_rows),
        name="move_cached_tokens",
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars) + [hbm],
        out_specs=hbm,
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        scratch_shapes=[
            pltpu.VMEM((parts, heads, group_rows, head_dim), kv_pages.dtype),
            pltpu.VMEM((sources.shape[0], parts, heads, head_dim), jnp.float32),  # the rows on their way
            pltpu.SemaphoreType.DMA,
        ],
        input_output_aliases={len(scalars): 0},
        interpret=interpret,
    )(*scalars, kv_pages)


def _kernel(
    group_rows: int,
    moves: Any,
    source_page: Any,
    source_row: Any,
    target_page: Any,
    target_row: Any,
    _: Any,
    pages: Any,
    group: Any,
    moved: Any,
    semaphore: Any,
) -> None:
    row_in_group = lax.broadcasted_iota(jnp.int32, group.shape, 2)

    def around(page: Any, row: Any) -> Any:
        start = pl.multiple_of(row // group_rows * group_rows, group_rows)
        return pages.at[:, page, :, pl.ds(start, group_rows)]

    def copy(source: Any, target: Any) -> None:
        pending = pltpu.make_async_copy(source, target, semaphore)
        pending.start()
        pending.wait()

    def take(entry: Any, carry: None) -> None:
        @pl.when(moves[entry] > 0)
        def _() -> None:
            row = source_row[entry]
            copy(around(source_page[entry], row), group)
            chosen = row_in_group == row % group_rows
            moved[entry] = jnp.sum(jnp.where(chosen, group[...].astype(jnp.float32), 0.0), axis=2)

    def put(entry: Any, carry: None) -> None:
        @pl.when(moves[entry] > 0)
        def _() -> None:
            row = target_row[entry]
            target = around(target_page[entry], row)
            copy(target, group)
            chosen = row_in_group == row % group_rows
            new = jnp.broadcast_to(moved[entry][:, :, None, :], group.shape)
            group[...] = jnp.where(chosen, new, group[...].astype(jnp.float32)).astype(group.dtype)
            copy(group, target)

    for phase in (take, put):
        lax.fori_loop(0, moves.shape[0], phase, None)
