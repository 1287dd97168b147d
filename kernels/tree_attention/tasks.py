"""What the TPU kernels of attention are told about a step: which tokens attend where, and what is written where.

Everything here is small integer arithmetic in jnp, on arrays as long as the step; nothing of it grows with the cache.
Lists of scalars are one-dimensional, as the scalar memory of a TPU pads rows to 128 words.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
_ALL_ONES = 0xFFFFFFFF
_WORD_TOKENS = 64


class QueryTasks(NamedTuple):
    """Runs of up to `tile` tokens of one sequence, each attended by one pass over its part of the cache."""

    total: jax.Array  # int32[1], tasks in use
    sequence: jax.Array  # int32[N + 1]; one more than there can be, so that a look ahead stays inside
    first_token: jax.Array  # int32[N + 1], in the step
    num_tokens: jax.Array  # int32[N + 1]
    first_position: jax.Array  # int32[N + 1], the first position that any of the tokens may see
    end_position: jax.Array  # int32[N + 1], behind the last one; 0 for a task that isn't in use


class WriteTasks(NamedTuple):
    """Aligned groups of rows of a page that get new keys and values."""

    total: jax.Array  # int32[1]
    page: jax.Array  # int32[W + 1]
    group: jax.Array  # int32[W + 1], which group of rows of the page
    token: jax.Array  # int32[W + 1], the step's token that the first of the new rows gets
    first_row: jax.Array  # int32[W + 1], of the new rows in the group
    num_rows: jax.Array  # int32[W + 1], 0 for a task that isn't in use


def query_tile(num_tokens: int, num_sequences: int, most: int) -> int:
    """Tokens a task: what a sequence has on average, as a power of two."""
    average = -(-num_tokens // num_sequences)
    return min(most, 1 << (average - 1).bit_length())


def query_tasks(
    kv_lens: jax.Array, cu_q_lens: jax.Array, num_seqs: jax.Array, rows: jax.Array, *, tile: int
) -> QueryTasks:
    """Cuts each sequence's tokens into tasks; `rows` are those of `token_rows`."""
    num_tokens, num_sequences = rows.shape[0], kv_lens.shape[0]
    q_lens = _lengths(cu_q_lens, num_seqs)
    most = min(num_tokens, (num_tokens + num_sequences * (tile - 1)) // tile)
    per_sequence = -(-q_lens // tile)
    sequence, index, used = _spread(per_sequence, most + 1)
    start = index * tile
    length = jnp.clip(q_lens[sequence] - start, 0, tile)
    cached = (kv_lens - q_lens)[sequence]
    # A node may name any token of its tree, whose tokens are the first 64 of the sequence's step at most.
    end = jnp.minimum(kv_lens[sequence], cached + jnp.maximum(start + length, _WORD_TOKENS))
    first_token = cu_q_lens[sequence] + start
    tokens = jnp.clip(first_token[:, None] + jnp.arange(tile), 0, num_tokens - 1)
    inside = jnp.arange(tile) < length[:, None]
    first_position = jnp.min(jnp.where(inside, rows[tokens, 0], jnp.iinfo(jnp.int32).max), axis=1)
    return QueryTasks(
        total=jnp.minimum(jnp.sum(per_sequence), most)[None],
        sequence=sequence,
        first_token=jnp.where(used, first_token, 0),
        num_tokens=jnp.where(used, length, 0),
        first_position=jnp.where(used, jnp.clip(first_position, 0, end), 0),
        end_position=jnp.where(used, end, 0),
    )


def token_rows(
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    ancestors: jax.Array,
    *,
    sliding_window: int | None,
) -> jax.Array:
    """int32[T, 4]: what each token sees, as (first, end, low word, high word).

    Positions in [first, end) of the sequence, and of those from the step's first on, the ones whose bit is set.
    A token of a prompt chunk has no bits and its own position as the last; a node has the cache's end.
    """
    num_tokens = ancestors.shape[0]
    q_lens = _lengths(cu_q_lens, num_seqs)
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    sequence = jnp.sum(tokens[:, None] >= cu_q_lens[None, 1:], axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, kv_lens.shape[0] - 1)
    index = tokens - cu_q_lens[sequence]
    cached = (kv_lens - q_lens)[sequence]
    causal = jnp.all(ancestors == jnp.uint32(_ALL_ONES), axis=1)
    depth = jnp.sum(lax.population_count(ancestors), axis=1).astype(jnp.int32) - 1
    place = jnp.where(causal, index, depth)
    words = ancestors
    first = jnp.zeros_like(index)
    if sliding_window is not None:
        first = jnp.maximum(0, cached + place - (sliding_window - 1))
        words = _within_window(words, place, cu_q_lens[sequence], sliding_window)
    words = jnp.where(causal[:, None], 0, lax.bitcast_convert_type(words, jnp.int32))
    end = cached + jnp.where(causal, index + 1, 0)
    return jnp.stack([first, end, words[:, 0], words[:, 1]], axis=1)


def lane_rows(rows: jax.Array) -> jax.Array:
    """int32[T, 1, 128]: `token_rows` as whole vector registers, so that a copy may start at any token."""
    return jnp.pad(rows, ((0, 0), (0, LANES - rows.shape[1])))[:, None, :]


def write_tasks(
    kv_lens: jax.Array,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    num_tokens: int,
    page_size: int,
    group_rows: int,
) -> WriteTasks:
    """The groups of rows that the step's tokens fall into."""
    num_sequences, pages = page_table.shape
    q_lens = _lengths(cu_q_lens, num_seqs)
    first_new = kv_lens - q_lens
    first_group = first_new // group_rows
    per_sequence = jnp.where(q_lens > 0, (kv_lens - 1) // group_rows - first_group + 1, 0)
    most = min(num_tokens, num_tokens // group_rows + 2 * num_sequences)
    sequence, index, used = _spread(per_sequence, most + 1)
    position = (first_group[sequence] + index) * group_rows
    start = jnp.maximum(position, first_new[sequence])
    end = jnp.minimum(position + group_rows, kv_lens[sequence])
    page = page_table.reshape(-1)[sequence * pages + jnp.clip(position // page_size, 0, pages - 1)]
    return WriteTasks(
        total=jnp.minimum(jnp.sum(per_sequence), most)[None],
        page=jnp.where(used, page, 0),
        group=jnp.where(used, position % page_size // group_rows, 0),
        token=jnp.where(used, cu_q_lens[sequence] + start - first_new[sequence], 0),
        first_row=jnp.where(used, start - position, 0),
        num_rows=jnp.where(used, end - start, 0),
    )


def _lengths(cu_q_lens: jax.Array, num_seqs: jax.Array) -> jax.Array:
    """int32[S]: tokens of each sequence in the step, 0 for those not in use."""
    lengths = cu_q_lens[1:] - cu_q_lens[:-1]
    return jnp.where(jnp.arange(lengths.shape[0]) < num_seqs[0], lengths, 0)


def _spread(counts: jax.Array, total: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of `total` items of which counts[s] belong to s, in order: owner, index within its items, whether in use."""
    ends = jnp.cumsum(counts)
    item = jnp.arange(total, dtype=jnp.int32)
    owner = jnp.sum(item[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    used = owner < counts.shape[0]
    owner = jnp.minimum(owner, counts.shape[0] - 1)
    return owner, item - (ends - counts)[owner], used


def _within_window(
    words: jax.Array, place: jax.Array, step_start: jax.Array, sliding_window: int
) -> jax.Array:
    """uint32[T, 2]: `words` without the ancestors that the window hides. place, step_start int32[T]."""
    num_tokens = words.shape[0]
    bit = jnp.arange(_WORD_TOKENS)
    token = jnp.clip(step_start[:, None] + bit, 0, num_tokens - 1)
    near = place[token] > place[:, None] - sliding_window  # [T, 64]
    shifted = jnp.where(near, jnp.uint32(1) << (bit % 32).astype(jnp.uint32), jnp.uint32(0))
    return words & jnp.sum(shifted.reshape(num_tokens, 2, 32), axis=2, dtype=jnp.uint32)
