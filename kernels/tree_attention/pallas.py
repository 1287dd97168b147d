"""Tree attention over pages for TPU.

One call writes the step's keys and values into their pages, then attends, task after task (`tasks.py`). A task's
cache comes in blocks of whole pages, two blocks in flight; a block holds keys and values by head, as pages do. The
work of a block is staged across heads (all scores, then all maxima and exponentials, then all products), so that one
head's latencies pass under another's work. Ancestors are two words a token in a vector register; the mask of a block
is worked out from them once and serves all heads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .quantize import to_page_dtype
from .tasks import LANES, QueryTasks, WriteTasks, lane_rows, query_tasks, query_tile, token_rows, write_tasks
from .tuning import Blocks

_MASKED = -1e30
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What one compilation of the kernel depends on, beside its arguments' shapes."""

    tile: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    parts: int
    """What a page holds: 2, keys and values, or 1, rows whose first `value_dim` numbers are the values."""
    page_size: int
    pages_per_sequence: int
    block_pages: int
    stage_heads: int
    group_rows: int
    compute_dtype: Any
    scale: float
    soft_cap: float | None
    has_sinks: bool

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Rows of queries of one key head: for each of its query heads, the tile's tokens."""
        return self.group * self.tile

    @property
    def mask_rows(self) -> int:
        """Rows of the mask: whole registers of tokens serve every query head."""
        return self.tile if self.tile % 8 == 0 else self.rows

    @property
    def block_keys(self) -> int:
        return self.block_pages * self.page_size


def tree_paged_attention_pallas(
    q: jax.Array,
    new_rows: Sequence[jax.Array],
    pages: jax.Array,
    kv_lens: jax.Array,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    ancestors: jax.Array,
    num_seqs: jax.Array,
    sinks: jax.Array | None,
    k_scale: jax.Array,
    v_scale: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    value_dim: int,
    blocks: Blocks,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `rollout_spec.kernels.tree_paged_attention`, and `mla_tree_attention`, which is the same with one key head.

    Args:
        q: [T, Hq, K].
        new_rows: (keys, values), each [T, Hk, K], or for latent attention only (rows,).
        pages: [len(new_rows), pages, Hk, page_size, K].
        k_scale, v_scale: float32[Hk].
        value_dim: how many of a value row's K numbers are values.
        interpret: what `pallas_call` takes.

    Returns:
        (out [T, Hq, value_dim], pages).
    """
    num_tokens, num_heads, key_dim = q.shape
    num_sequences, pages_per_sequence = page_table.shape
    parts, _, num_kv_heads, page_size, _ = pages.shape
    compute_dtype = jnp.float32 if jnp.float32 in (q.dtype, pages.dtype) else jnp.bfloat16
    sizes = _Sizes(
        tile=query_tile(num_tokens, num_sequences, blocks.query_tokens),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        parts=parts,
        page_size=page_size,
        pages_per_sequence=pages_per_sequence,
        block_pages=max(1, blocks.keys // page_size),
        stage_heads=min(blocks.heads, num_kv_heads),
        group_rows=min(page_size, 32 // pages.dtype.itemsize),
        compute_dtype=compute_dtype,
        scale=scale,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
    )
    rows = token_rows(kv_lens, cu_q_lens, num_seqs, ancestors, sliding_window=sliding_window)
    queries = query_tasks(kv_lens, cu_q_lens, num_seqs, rows, tile=sizes.tile)
    writes = write_tasks(
        kv_lens,
        page_table,
        cu_q_lens,
        num_seqs,
        num_tokens=num_tokens,
        page_size=page_size,
        group_rows=sizes.group_rows,
    )
    sink_rows = jnp.zeros((num_heads,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    first_new = kv_lens - (cu_q_lens[1:] - cu_q_lens[:-1])
    in_smem = [*queries, *writes, first_new, page_table.reshape(-1), k_scale, v_scale, sink_rows]
    in_hbm = [q, lane_rows(rows), *new_rows, pages]
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, sizes),
        name="tree_paged_attention",
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(in_smem) + [hbm] * len(in_hbm),
        out_specs=[hbm, hbm],
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, num_heads, value_dim), q.dtype),
            jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        ],
        scratch_shapes=_scratch(sizes, q.dtype, new_rows[0].dtype, pages.dtype),
        input_output_aliases={len(in_smem) + len(in_hbm) - 1: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=32 << 20, disable_bounds_checks=True),
        interpret=interpret,
    )(*in_smem, *in_hbm)


def _scratch(sizes: _Sizes, q_dtype: Any, k_dtype: Any, page_dtype: Any) -> list[Any]:
    s = sizes
    heads, rows, keys, values = s.num_kv_heads, s.rows, s.key_dim, s.value_dim
    return [
        pltpu.VMEM((2, s.parts, s.block_pages, heads, s.page_size, keys), page_dtype),  # blocks of pages
        pltpu.VMEM((2, s.tile, s.num_heads, keys), q_dtype),  # queries as they come
        pltpu.VMEM((2, s.tile, 1, LANES), jnp.int32),  # what they see, as it comes
        pltpu.VMEM((s.tile, s.num_heads, values), q_dtype),  # output as it goes
        pltpu.VMEM((s.tile, s.num_heads, keys), jnp.float32),  # both, on the way between the two orders
        pltpu.VMEM((heads, rows, keys), s.compute_dtype),  # queries by key head
        pltpu.VMEM((4, s.mask_rows, LANES), jnp.int32),  # what they see, a register a field
        pltpu.VMEM((heads, rows, LANES), jnp.float32),  # largest score, the same in all lanes
        pltpu.VMEM((heads, rows, LANES), jnp.float32),  # sum of exponentials, a part a lane
        pltpu.VMEM((heads, rows, values), jnp.float32),  # weighted values
        pltpu.VMEM((2, s.parts, heads, s.group_rows, keys), page_dtype),  # groups of rows that are written
        pltpu.VMEM((2, s.parts, s.group_rows, heads, keys), k_dtype),  # new keys and values as they come
        pltpu.VMEM((s.parts, s.group_rows, heads, keys), jnp.float32),
        pltpu.SemaphoreType.DMA((2,)),  # blocks of pages
        pltpu.SemaphoreType.DMA((2,)),  # queries
        pltpu.SemaphoreType.DMA,  # output
        pltpu.SemaphoreType.DMA((2,)),  # reads of the write phase
        pltpu.SemaphoreType.DMA((2,)),  # its writes
    ]


def _kernel(sizes: _Sizes, *refs: Any) -> None:
    queries, refs = QueryTasks(*refs[:6]), refs[6:]
    writes, refs = WriteTasks(*refs[:6]), refs[6:]
    first_new, page_table, k_scale, v_scale, sinks, q, rows, *others = refs
    new_rows, (_, out, pages, *scratch) = others[: sizes.parts], others[sizes.parts :]
    _write_phase(sizes, writes, k_scale, v_scale, new_rows, pages, *scratch[10:13], *scratch[16:18])
    _attend_phase(
        sizes,
        queries,
        first_new,
        page_table,
        k_scale,
        v_scale,
        sinks,
        q,
        rows,
        out,
        pages,
        *scratch[:10],
        *scratch[13:16],
    )


def _write_phase(
    sizes: _Sizes,
    tasks: WriteTasks,
    k_scale: Any,
    v_scale: Any,
    new_rows: Sequence[Any],
    pages: Any,
    group_buffer: Any,
    new_buffer: Any,
    wide: Any,
    read_semaphores: Any,
    write_semaphores: Any,
) -> None:
    """Puts the step's keys and values into their pages: reads a group of rows, replaces some, writes it back."""
    count = tasks.total[0]
    heads, group_rows = sizes.num_kv_heads, sizes.group_rows

    def in_pages(task: Any) -> Any:
        start = pl.multiple_of(tasks.group[task] * group_rows, group_rows)
        return pages.at[:, tasks.page[task], :, pl.ds(start, group_rows)]

    def reads(task: Any) -> list[Any]:
        slot, first, length = task % 2, tasks.first_row[task], tasks.num_rows[task]
        old_heads = jnp.where(length == group_rows, 0, heads)  # a group that is replaced whole isn't read
        start = pl.multiple_of(tasks.group[task] * group_rows, group_rows)
        old = pages.at[:, tasks.page[task], pl.ds(0, old_heads), pl.ds(start, group_rows)]
        copies = []
        for index, new in enumerate(new_rows):
            target = new_buffer.at[slot, index, pl.ds(first, length)]
            source = new.at[pl.ds(tasks.token[task], length)]
            copies.append(pltpu.make_async_copy(source, target, read_semaphores.at[slot]))
        old_target = group_buffer.at[slot, :, pl.ds(0, old_heads)]
        return [*copies, pltpu.make_async_copy(old, old_target, read_semaphores.at[slot])]

    def write(task: Any) -> Any:
        slot = task % 2
        return pltpu.make_async_copy(group_buffer.at[slot], in_pages(task), write_semaphores.at[slot])

    @pl.when(count > 0)
    def _() -> None:
        for copy in reads(0):
            copy.start()

    def step(task: Any, carry: None) -> None:
        slot, first, length = task % 2, tasks.first_row[task], tasks.num_rows[task]

        @pl.when(task > 0)
        def _() -> None:
            write(task - 1).wait()

        @pl.when(task + 1 < count)
        def _() -> None:
            for copy in reads(task + 1):
                copy.start()

        for copy in reads(task):
            copy.wait()
        row = lax.broadcasted_iota(jnp.int32, (group_rows, sizes.key_dim), 0)
        is_new = (row >= first) & (row < first + length)
        for index, scales in enumerate((k_scale, v_scale)[: sizes.parts]):
            wide[index] = new_buffer[slot, index].astype(jnp.float32)
            for head in range(heads):
                new = to_page_dtype(wide[index, :, head, :], scales[head], group_buffer.dtype)
                old = group_buffer[slot, index, head]
                merged = jnp.where(is_new, new.astype(jnp.float32), old.astype(jnp.float32))
                group_buffer[slot, index, head] = merged.astype(group_buffer.dtype)
        write(task).start()

    lax.fori_loop(0, count, step, None)

    @pl.when(count > 0)
    def _() -> None:
        write(count - 1).wait()


def _attend_phase(
    sizes: _Sizes,
    tasks: QueryTasks,
    first_new: Any,
    page_table: Any,
    k_scale: Any,
    v_scale: Any,
    sinks: Any,
    q: Any,
    rows: Any,
    out: Any,
    pages: Any,
    block_buffer: Any,
    query_buffer: Any,
    row_buffer: Any,
    out_buffer: Any,
    wide: Any,
    by_head: Any,
    seen: Any,
    largest: Any,
    total: Any,
    weighted: Any,
    block_semaphores: Any,
    query_semaphores: Any,
    out_semaphore: Any,
) -> None:
    s = sizes
    count = tasks.total[0]

    def live_pages(task: Any) -> tuple[Any, Any]:
        """The first page of which any token of the task sees anything, and the one behind the last."""
        end = _divide(tasks.end_position[task] + s.page_size - 1, s.page_size)
        return _divide(tasks.first_position[task], s.page_size), end

    def page_starts(task: Any, block: Any, slot: Any) -> list[Callable[[], None]]:
        """Each starts the copy of a page: of no heads, so of nothing, for a page that isn't live."""
        table_start = tasks.sequence[task] * s.pages_per_sequence
        first_page, end_page = live_pages(task)

        def start_page(index: int) -> None:
            page = block * s.block_pages + index
            heads = pl.ds(0, jnp.where((page >= first_page) & (page < end_page), s.num_kv_heads, 0))
            number = page_table[table_start + jnp.minimum(page, s.pages_per_sequence - 1)]
            target = block_buffer.at[slot, :, index, heads]
            pltpu.make_async_copy(pages.at[:, number, heads], target, block_semaphores.at[slot]).start()

        return [functools.partial(start_page, index) for index in range(s.block_pages)]

    def wait_for_block(task: Any, block: Any, slot: Any) -> None:
        """Waits once for the bytes of all its live pages."""
        first_page, end_page = live_pages(task)
        start = block * s.block_pages
        count = jnp.minimum(end_page, start + s.block_pages) - jnp.maximum(first_page, start)
        as_long = block_buffer.at[slot, :, pl.ds(0, count)]
        pltpu.make_async_copy(as_long, as_long, block_semaphores.at[slot]).wait()

    def query_copies(task: Any) -> list[Any]:
        slot, length = task % 2, tasks.num_tokens[task]
        source = pl.ds(tasks.first_token[task], length)
        return [
            pltpu.make_async_copy(
                q.at[source], query_buffer.at[slot, pl.ds(0, length)], query_semaphores.at[slot]
            ),
            pltpu.make_async_copy(
                rows.at[source], row_buffer.at[slot, pl.ds(0, length)], query_semaphores.at[slot]
            ),
        ]

    def out_copy(task: Any) -> Any:
        length = tasks.num_tokens[task]
        target = out.at[pl.ds(tasks.first_token[task], length)]
        return pltpu.make_async_copy(out_buffer.at[pl.ds(0, length)], target, out_semaphore)

    def first_block(task: Any) -> Any:
        return _divide(tasks.first_position[task], s.block_keys)

    @pl.when(count > 0)
    def _() -> None:
        for copy in query_copies(0):
            copy.start()
        for start_page in page_starts(0, first_block(0), 0):
            start_page()

    def attend_task(task: Any, slot: Any) -> Any:
        for copy in query_copies(task):
            copy.wait()
        for copy in query_copies(task + 1):  # of no tokens behind the last task
            copy.start()
        _queries_by_head(s, query_buffer.at[task % 2], row_buffer.at[task % 2], wide, by_head, seen)
        _start_softmax(s, sinks, k_scale, largest, total, weighted)
        end = tasks.end_position[task]
        end_block = _divide(end + s.block_keys - 1, s.block_keys)
        new_from = first_new[tasks.sequence[task]]

        def attend_block(block: Any, slot: Any) -> Any:
            is_last = block + 1 == end_block
            next_task = jnp.where(is_last, task + 1, task)
            next_block = jnp.where(is_last, first_block(task + 1), block + 1)
            wait_for_block(task, block, slot)
            start = block * s.block_keys
            _hide_dead_rows(s, block_buffer, slot, tasks.first_position[task] - start, end - start)
            starts = page_starts(next_task, next_block, 1 - slot)
            keys, values = block_buffer.at[slot, 0], block_buffer.at[slot, s.parts - 1]
            _attend_block(
                s, start, new_from, k_scale, by_head, seen, keys, values, largest, total, weighted, starts
            )
            return 1 - slot

        slot = lax.fori_loop(first_block(task), end_block, attend_block, slot)

        @pl.when(task > 0)
        def _() -> None:
            out_copy(task - 1).wait()

        _finish(s, v_scale, total, weighted, wide, out_buffer)
        out_copy(task).start()
        return slot

    lax.fori_loop(0, count, attend_task, 0)

    @pl.when(count > 0)
    def _() -> None:
        out_copy(count - 1).wait()


def _divide(value: Any, power_of_two: int) -> Any:
    """value // power_of_two for a value that isn't negative, in one instruction."""
    return lax.shift_right_logical(value, jnp.int32(power_of_two.bit_length() - 1))


def _queries_by_head(sizes: _Sizes, queries: Any, rows: Any, wide: Any, by_head: Any, seen: Any) -> None:
    """From tokens of heads to heads of tokens, through 32-bit rows, which can be read with a stride."""
    s = sizes
    wide[...] = queries[...].astype(jnp.float32)
    for head in range(s.num_heads):
        first = head % s.group * s.tile
        by_head[head // s.group, first : first + s.tile, :] = wide[:, head, :].astype(s.compute_dtype)
    words = rows[:, 0, :]
    for index in range(4):
        column = jnp.broadcast_to(words[:, index : index + 1], (s.tile, LANES))
        for first in range(0, s.mask_rows, s.tile):
            seen[index, first : first + s.tile, :] = column


def _start_softmax(sizes: _Sizes, sinks: Any, k_scale: Any, largest: Any, total: Any, weighted: Any) -> None:
    s = sizes
    weighted[...] = jnp.zeros_like(weighted)
    if not s.has_sinks:
        largest[...] = jnp.full_like(largest, _MASKED)
        total[...] = jnp.zeros_like(total)
        return
    # A sink is a key of its own with this score and a value of zero; its weight, 1, lies in the first lane.
    lane = lax.broadcasted_iota(jnp.int32, (s.tile, LANES), 1)
    for head in range(s.num_heads):
        kv_head, first = head // s.group, head % s.group * s.tile
        sink = sinks[head] / _unit(s, k_scale[kv_head])
        largest[kv_head, first : first + s.tile, :] = jnp.full((s.tile, LANES), sink)
        total[kv_head, first : first + s.tile, :] = jnp.where(lane == 0, 1.0, 0.0)


def _unit(sizes: _Sizes, k_scale: Any) -> Any:
    """What one unit of the scores that the softmax keeps is worth: with a soft cap they are final already."""
    return 1.0 if sizes.soft_cap is not None else sizes.scale * k_scale


def _hide_dead_rows(sizes: _Sizes, block_buffer: Any, slot: Any, first: Any, end: Any) -> None:
    """Zeroes the values of a block outside [first, end): what lies there may be anything, and 0 * NaN is NaN."""
    s = sizes

    def clear(page: Any, carry: None) -> None:
        row = lax.broadcasted_iota(jnp.int32, (s.page_size, s.key_dim), 0) + page * s.page_size
        live = (row >= first) & (row < end)
        for head in range(s.num_kv_heads):
            values = block_buffer[slot, s.parts - 1, page, head].astype(jnp.float32)
            block_buffer[slot, s.parts - 1, page, head] = jnp.where(live, values, 0.0).astype(
                block_buffer.dtype
            )

    @pl.when((first > 0) | (end < s.block_keys))
    def _() -> None:
        lax.fori_loop(0, jnp.clip((first + s.page_size - 1) // s.page_size, 0, s.block_pages), clear, None)
        lax.fori_loop(jnp.clip(end // s.page_size, 0, s.block_pages), s.block_pages, clear, None)


def _attend_block(
    sizes: _Sizes,
    start: Any,
    new_from: Any,
    k_scale: Any,
    by_head: Any,
    seen: Any,
    keys: Any,
    values: Any,
    largest: Any,
    total: Any,
    weighted: Any,
    page_starts: Sequence[Callable[[], None]],
) -> None:
    """One block of keys and values [pages, Hk, page_size, D] from position `start` on, for all heads.

    The next block's copies are started between the heads' matmuls, where their scalar work costs no bundles.
    """
    s = sizes
    ends = [len(page_starts) * head // s.num_kv_heads for head in range(s.num_kv_heads + 1)]

    def scores_of(head: int) -> jax.Array:
        scores = _matmul(by_head[head], _rows_of(s, keys, head), contract_rhs=1)
        for start_page in page_starts[ends[head] : ends[head + 1]]:
            start_page()
        return scores

    visible = _visible(s, start, new_from, seen)
    for first in range(0, s.num_kv_heads, s.stage_heads):
        heads = range(first, min(first + s.stage_heads, s.num_kv_heads))
        scores = [scores_of(head) for head in heads]
        weights, shrinks = [], []
        for head, score in zip(heads, scores, strict=True):
            masked = _masked(s, score, k_scale[head], visible)
            old = largest[head]
            new = jnp.maximum(old, jnp.max(masked, axis=1, keepdims=True))
            unit = _unit(s, k_scale[head]) * _LOG2_E
            shrink = jnp.exp2((old - new) * unit)
            weight = jnp.exp2((masked - _repeat(new, s.block_keys)) * unit)
            largest[head] = new
            total[head] = total[head] * shrink + _sum_of_registers(weight)
            weights.append(weight.astype(s.compute_dtype))
            shrinks.append(shrink)
        for head, weight, shrink in zip(heads, weights, shrinks, strict=True):
            product = _matmul(weight, _rows_of(s, values, head)[:, : s.value_dim], contract_rhs=0)
            weighted[head] = weighted[head] * _repeat(shrink, s.value_dim) + product


def _rows_of(sizes: _Sizes, block: Any, head: int) -> jax.Array:
    """[keys, D] of one head, in the type that matmuls work in."""
    pages = block[:, head].astype(sizes.compute_dtype)
    return pages.reshape(sizes.block_keys, sizes.key_dim)


def _matmul(lhs: jax.Array, rhs: jax.Array, contract_rhs: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        lhs,
        rhs,
        (((1,), (contract_rhs,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _visible(sizes: _Sizes, start: Any, new_from: Any, seen: Any) -> jax.Array:
    """bool[mask rows, keys]: which keys of the block from `start` on each query may see."""
    s = sizes
    lane = lax.broadcasted_iota(jnp.int32, (s.mask_rows, LANES), 1)
    first, end, low, high = (seen[index] for index in range(4))
    parts = []
    for offset in range(0, s.block_keys, LANES):
        position = start + offset + lane
        bit = position - new_from
        word = jnp.where(bit < 32, low, high)
        in_tree = (lax.shift_right_logical(word, bit & 31) & 1) * jnp.where((bit >= 0) & (bit < 64), 1, 0)
        parts.append(((position >= first) & (position < end)) | (in_tree > 0))
    return jnp.concatenate(parts, axis=1)[:, : s.block_keys]


def _masked(sizes: _Sizes, scores: jax.Array, k_scale: Any, visible: jax.Array) -> jax.Array:
    s = sizes
    if s.soft_cap is not None:
        scores = s.soft_cap * jnp.tanh(scores * (s.scale * k_scale / s.soft_cap))
    if s.mask_rows == s.rows:
        return jnp.where(visible, scores, _MASKED)
    by_query_head = scores.reshape(s.group, s.tile, s.block_keys)
    return jnp.where(visible[None], by_query_head, _MASKED).reshape(s.rows, s.block_keys)


def _repeat(column: jax.Array, width: int) -> jax.Array:
    """[R, width] of [R, 128] whose lanes are all the same."""
    if width < LANES:
        return column[:, :width]
    return jnp.concatenate([column] * (width // LANES), axis=1)


def _sum_of_registers(weights: jax.Array) -> jax.Array:
    """[R, 128]: sums over every 128th column."""
    parts: Sequence[jax.Array] = [
        weights[:, first : first + LANES] for first in range(0, weights.shape[1], LANES)
    ]
    return functools.reduce(jnp.add, parts)


def _finish(sizes: _Sizes, v_scale: Any, total: Any, weighted: Any, wide: Any, out: Any) -> None:
    s = sizes
    for kv_head in range(s.num_kv_heads):
        result = weighted[kv_head] * (v_scale[kv_head] / jnp.sum(total[kv_head], axis=1, keepdims=True))
        for index in range(s.group):
            wide[:, kv_head * s.group + index, : s.value_dim] = result[index * s.tile : (index + 1) * s.tile]
    out[...] = wide[:, :, : s.value_dim].astype(out.dtype)
