"""Paged attention over draft trees in plain jnp: what CPU and GPU run, and what other backends are tested against.

Pages are stored as [2, pages, kv_heads, page_size, head_dim] (keys, then values), so that one head's part of a
page is contiguous: gathering pages is a copy of whole rows, and the matmuls read keys and values as gathered.

Queries are packed into blocks of up to `_MAX_QUERY_BLOCK` tokens of one sequence; all blocks walk the cache
together, some positions at a time, with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022).
A block of positions that is masked for a query adds exact zeros, so a sequence's result doesn't depend on the
lengths of others.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .quantize import is_scaled, to_page_dtype

_KEY_BLOCKS = (128, 64)
"""Positions walked at a time: the first of these, in tokens, whose keys and values stay within _KEY_BLOCK_BYTES."""
_KEY_BLOCK_BYTES = 1 << 20
_MAX_QUERY_BLOCK = 64
_MASKED = -1e30
_ALL_ONES = 0xFFFFFFFF


class QueryBlocks(NamedTuple):
    """N blocks of B query tokens; every block belongs to one sequence."""

    token: jax.Array  # int32[N, B], index into the step's tokens (clamped where not valid)
    valid: jax.Array  # bool[N, B]
    sequence: jax.Array  # int32[N]
    step_index: jax.Array  # int32[N, B], index of the token within its sequence's step
    block_of_token: jax.Array  # int32[T]
    offset_of_token: jax.Array  # int32[T]


def tree_paged_attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
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
    k_scale: jax.Array,
    v_scale: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `rollout_spec.kernels.tree_paged_attention`. k_scale, v_scale: float32[Hk].

    Without v the keys are the values, cached once; v_scale is k_scale then.
    """
    k = to_page_dtype(k, k_scale[:, None], kv_pages.dtype)
    v = None if v is None else to_page_dtype(v, v_scale[:, None], kv_pages.dtype)
    num_tokens, num_sequences = q.shape[0], kv_lens.shape[0]
    live = jnp.arange(num_sequences) < num_seqs[0]
    q_lens = jnp.where(live, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    kv_lens = jnp.where(live, kv_lens, 0)
    sequence_of_token = _sequence_of_token(num_tokens, cu_q_lens)
    in_use = jnp.arange(num_tokens) < cu_q_lens[num_seqs[0]]

    step_index = jnp.arange(num_tokens) - cu_q_lens[sequence_of_token]
    slot_position = kv_lens[sequence_of_token] - q_lens[sequence_of_token] + step_index
    kv_pages = _write(kv_pages, k, v, slot_position, page_table[sequence_of_token], in_use)

    blocks = _pack_queries(num_tokens, num_sequences, q_lens, cu_q_lens)
    if is_scaled(kv_pages.dtype):  # the same for all keys of a head, so queries can carry it
        q_scale = jnp.repeat(k_scale, q.shape[1] // k.shape[1])[None, :, None]
        scaled_q = q.astype(jnp.float32) * q_scale
    else:
        scaled_q = q
    out = _attend(
        scaled_q,
        kv_pages,
        blocks,
        kv_lens=kv_lens,
        q_lens=q_lens,
        cu_q_lens=cu_q_lens,
        page_table=page_table,
        ancestors=ancestors,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    out = out[blocks.block_of_token, blocks.offset_of_token]
    if is_scaled(kv_pages.dtype):
        out = (out * jnp.repeat(v_scale, q.shape[1] // k.shape[1])[None, :, None]).astype(q.dtype)
    return out, kv_pages


def _sequence_of_token(num_tokens: int, cu_q_lens: jax.Array) -> jax.Array:
    """int32[T]: the sequence whose range in `cu_q_lens` holds each token (the last one for unused tokens)."""
    ends = cu_q_lens[1:]
    sequence = jnp.sum(jnp.arange(num_tokens)[:, None] >= ends[None, :], axis=-1, dtype=jnp.int32)
    return jnp.minimum(sequence, ends.shape[0] - 1)


def _write(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    slot_position: jax.Array,
    pages_of_token: jax.Array,
    in_use: jax.Array,
) -> jax.Array:
    """Scatters keys and values [T, Hk, D] to their slots; tokens not in use are dropped."""
    planes, num_pages, num_heads, page_size, head_dim = kv_pages.shape
    page = jnp.take_along_axis(pages_of_token, (slot_position // page_size)[:, None], axis=1, mode="clip")
    head = jnp.arange(num_heads)[None, :]
    row = (page * num_heads + head) * page_size + (slot_position % page_size)[:, None]  # [T, Hk]
    row = jnp.where(in_use[:, None], row, planes * num_pages * num_heads * page_size)
    plane_size = num_pages * num_heads * page_size
    rows = (row if v is None else jnp.concatenate([row, row + plane_size])).reshape(-1)
    values = (k if v is None else jnp.concatenate([k, v])).reshape(-1, head_dim).astype(kv_pages.dtype)
    flat = kv_pages.reshape(-1, head_dim).at[rows].set(values, mode="drop", unique_indices=True)
    return flat.reshape(kv_pages.shape)


def _pack_queries(
    num_tokens: int, num_sequences: int, q_lens: jax.Array, cu_q_lens: jax.Array
) -> QueryBlocks:
    # A block as long as the average number of tokens a sequence has: one block a sequence in a balanced step.
    average = -(-num_tokens // num_sequences)
    size = min(_MAX_QUERY_BLOCK, 1 << (average - 1).bit_length())
    count = min(num_tokens, (num_tokens + num_sequences * (size - 1)) // size)

    per_sequence = -(-q_lens // size)  # blocks of each sequence
    ends = jnp.cumsum(per_sequence)
    block = jnp.arange(count)
    sequence = jnp.sum(block[:, None] >= ends[None, :], axis=-1, dtype=jnp.int32)
    used = sequence < num_sequences
    sequence = jnp.minimum(sequence, num_sequences - 1)
    first = (block - (ends - per_sequence)[sequence]) * size
    step_index = first[:, None] + jnp.arange(size)
    valid = used[:, None] & (step_index < q_lens[sequence][:, None])
    token = jnp.clip(cu_q_lens[sequence][:, None] + step_index, 0, num_tokens - 1)

    sequence_of_token = _sequence_of_token(num_tokens, cu_q_lens)
    index_in_step = jnp.arange(num_tokens) - cu_q_lens[sequence_of_token]
    block_of_token = (ends - per_sequence)[sequence_of_token] + index_in_step // size
    return QueryBlocks(
        token=token,
        valid=valid,
        sequence=sequence,
        step_index=step_index,
        block_of_token=jnp.clip(block_of_token, 0, count - 1),
        offset_of_token=index_in_step % size,
    )


def _attend(
    q: jax.Array,
    kv_pages: jax.Array,
    blocks: QueryBlocks,
    *,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    cu_q_lens: jax.Array,
    page_table: jax.Array,
    ancestors: jax.Array,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention of all query blocks, [N, B, Hq, D]."""
    planes, num_pages, num_kv_heads, page_size, head_dim = kv_pages.shape
    num_blocks, size = blocks.token.shape
    group = q.shape[1] // num_kv_heads
    pages_per_step = max(1, _key_block(num_blocks * num_kv_heads * head_dim) // page_size)
    keys_per_step = pages_per_step * page_size

    table = page_table[blocks.sequence]  # [N, P]
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages_per_step)))
    head_rows = table[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads)[None, :, None]  # [N, Hk, P]
    page_rows = kv_pages.reshape(planes * num_pages * num_kv_heads, page_size * head_dim)

    block_kv_lens = kv_lens[blocks.sequence]
    first_new = (kv_lens - q_lens)[blocks.sequence]  # [N], cached tokens before the step's
    words = ancestors[blocks.token]  # [N, B, 2]
    causal = jnp.all(words == jnp.uint32(_ALL_ONES), axis=-1)  # [N, B]
    needed = jnp.where(jnp.any(blocks.valid, axis=-1), block_kv_lens, 0)
    num_steps = (jnp.max(needed) + keys_per_step - 1) // keys_per_step

    position_of_token, query_position = None, None
    if sliding_window is not None:
        position_of_token = _logical_positions(ancestors, kv_lens, q_lens, cu_q_lens)  # [T]
        query_position = position_of_token[blocks.token]

    grouped = q[blocks.token].reshape(num_blocks, size, num_kv_heads, group, head_dim)
    queries = (grouped.astype(jnp.float32) * scale).transpose(0, 2, 1, 3, 4)
    queries = queries.reshape(num_blocks * num_kv_heads, size * group, head_dim)

    def visible(first_key: jax.Array) -> jax.Array:
        """bool[N, B, keys]: which of the keys from `first_key` on each query may see."""
        key = first_key + jnp.arange(keys_per_step)
        new_index = key[None, :] - first_new[:, None]  # [N, keys], negative for cached tokens
        bit = jnp.clip(new_index, 0, 63).astype(jnp.uint32)[:, None, :]
        word = jnp.where(bit < 32, words[..., :1], words[..., 1:])  # [N, B, keys]
        in_tree = (word >> (bit & jnp.uint32(31))) & jnp.uint32(1) == 1
        in_chunk = new_index[:, None, :] <= blocks.step_index[..., None]
        seen = (new_index < 0)[:, None, :] | jnp.where(causal[..., None], in_chunk, in_tree)
        seen = seen & (key[None, :] < block_kv_lens[:, None])[:, None, :] & blocks.valid[..., None]
        if sliding_window is not None and position_of_token is not None and query_position is not None:
            token = cu_q_lens[blocks.sequence][:, None] + jnp.maximum(new_index, 0)
            new_position = jnp.take(position_of_token, token, mode="clip")
            key_position = jnp.where(new_index < 0, key[None, :], new_position)
            seen = seen & (key_position[:, None, :] > query_position[..., None] - sliding_window)
        return seen

    def step(state: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> tuple:
        index, largest, total, weighted = state
        rows = lax.dynamic_slice_in_dim(head_rows, index * pages_per_step, pages_per_step, axis=2)
        # Without the barrier XLA recomputes these indices for every element gathered.
        rows = lax.optimization_barrier(rows.reshape(-1))
        shape = (num_blocks * num_kv_heads, keys_per_step, head_dim)
        keys = jnp.take(page_rows, rows, axis=0, mode="clip").reshape(shape).astype(jnp.float32)
        values = keys
        if planes == 2:
            values = jnp.take(page_rows, rows + num_pages * num_kv_heads, axis=0, mode="clip")
            values = values.reshape(shape).astype(jnp.float32)
        scores = _batched_matmul(queries, keys, contract_rhs=2)  # [N*Hk, B*G, keys]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = scores.reshape(num_blocks, num_kv_heads, size, group, keys_per_step)
        mask = visible(index * keys_per_step)[:, None, :, None, :]
        scores = jnp.where(mask, scores, _MASKED)

        new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1))
        shrink = jnp.exp(largest - new_largest)
        # Where nothing was visible yet, these are ones; `shrink` is exactly 0 once something is.
        weights = jnp.exp(scores - new_largest[..., None])
        weights_of_head = weights.reshape(num_blocks * num_kv_heads, size * group, keys_per_step)
        added = _batched_matmul(weights_of_head, values, contract_rhs=1)

        def without_dead_values() -> jax.Array:
            live = index * keys_per_step + jnp.arange(keys_per_step) < block_kv_lens[:, None]  # [N, keys]
            live = jnp.repeat(live, num_kv_heads, axis=0)[..., None]
            return _batched_matmul(weights_of_head, jnp.where(live, values, 0.0), contract_rhs=1)

        # Slots behind a sequence hold what their last owner left there, and 0 * NaN is NaN. Masking values always
        # would cost as much as gathering them.
        added = lax.cond(jnp.any(jnp.isnan(added)), without_dead_values, lambda: added)
        added = added.reshape(weighted.shape)
        total = total * shrink + jnp.sum(weights, axis=-1)
        return index + 1, new_largest, total, weighted * shrink[..., None] + added

    per_head = (num_blocks, num_kv_heads, size, group)
    start = jnp.full(per_head, _MASKED, jnp.float32), jnp.zeros(per_head, jnp.float32)
    if sinks is not None:  # a sink is a key of its own with this score and a value of zero
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, 1, group)
        start = jnp.broadcast_to(sink, per_head), jnp.ones(per_head, jnp.float32)
    state = (jnp.int32(0), *start, jnp.zeros((*per_head, head_dim), jnp.float32))
    _, _, total, weighted = lax.while_loop(lambda state: state[0] < num_steps, step, state)

    out = weighted / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(num_blocks, size, q.shape[1], head_dim).astype(q.dtype)


def _key_block(numbers: int) -> int:
    """Positions to walk at a time, where each has `numbers` numbers of keys and as many of values in float32.

    Few steps cost less, until what they gather outgrows the processor's cache.
    """
    fitting = (keys for keys in _KEY_BLOCKS if 8 * numbers * keys <= _KEY_BLOCK_BYTES)
    return next(fitting, _KEY_BLOCKS[-1])


def _batched_matmul(a: jax.Array, b: jax.Array, contract_rhs: int) -> jax.Array:
    return lax.dot_general(a, b, (((2,), (contract_rhs,)), ((0,), (0,))), precision=lax.Precision.HIGHEST)


def _logical_positions(
    ancestors: jax.Array, kv_lens: jax.Array, q_lens: jax.Array, cu_q_lens: jax.Array
) -> jax.Array:
    """int32[T]: position in the text of each token of the step; a tree node's is its depth below the root."""
    num_tokens = ancestors.shape[0]
    sequence = _sequence_of_token(num_tokens, cu_q_lens)
    index = jnp.arange(num_tokens) - cu_q_lens[sequence]
    depth = jnp.sum(lax.population_count(ancestors), axis=-1).astype(jnp.int32) - 1
    causal = jnp.all(ancestors == jnp.uint32(_ALL_ONES), axis=-1)
    return (kv_lens - q_lens)[sequence] + jnp.where(causal, index, depth)
