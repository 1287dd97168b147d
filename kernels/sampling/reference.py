"""Sampling at every node of a draft tree, and the walk that accepts: plain jnp.

The sampler is Gumbel-max in two levels. A block of BLOCK_SIZE consecutive token ids wins with its log-sum-exp
plus noise, then a token of that block with its logit plus noise of its own. P(block) * P(token | block) is the
token's softmax probability, so this is exactly the categorical distribution, at the price of noise for V / 256
+ 256 numbers instead of V.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .filters import kept_tokens
from .inputs import (
    SEEN_IN_PROMPT,
    STOP_TOKEN,
    SampleRows,
    SamplingTables,
    SequenceSampling,
    TreeSample,
)
from .noise import BLOCK_LEVEL, TOKEN_LEVEL, gumbel

BLOCK_SIZE = 256
_CHUNK_ELEMENTS = 1 << 20
"""Logits sampled at a time."""


def tree_sample_reference(
    logits: jax.Array,
    rows: SampleRows,
    sequences: SequenceSampling,
    tables: SamplingTables,
    *,
    block_size: int = BLOCK_SIZE,
) -> TreeSample:
    """See `rollout_spec.kernels.tree_sample`."""
    uses_tables = jnp.any(sequences.uses_tables[rows.sequences])
    count = rows.parents.shape[0]
    on_path = jax.lax.cond(  # only penalties look at paths
        uses_tables,
        lambda: drafted_ancestors(rows.parents),
        lambda: jnp.zeros((count, count), jnp.bool_),
    )

    def sample(logits: jax.Array, rows_here: SampleRows, on_path: jax.Array) -> RowSample:
        per_row = jax.tree.map(lambda field: field[rows_here.sequences], sequences)
        return _sample_rows(logits, rows_here, per_row, tables, on_path, rows.token_ids, block_size)

    found = in_chunks(sample, (logits, rows, on_path))
    foretold = found.tokens[jnp.maximum(rows.parents, 0)] == rows.token_ids
    return TreeSample(
        tokens=found.tokens,
        logprobs=found.logprobs,
        sampled_logprobs=found.sampled_logprobs,
        kept_mass=found.kept_mass,
        target_logprobs=found.target_logprobs,
        accepted=holds_on_path(foretold, rows.parents),
    )


class RowSample(NamedTuple):
    tokens: jax.Array
    logprobs: jax.Array
    sampled_logprobs: jax.Array
    kept_mass: jax.Array
    target_logprobs: jax.Array


def in_chunks(function: Callable[..., RowSample], arguments: tuple) -> RowSample:
    """function(*arguments), some rows at a time; the first argument is the logits, [R, V].

    Temporaries of all rows at once (several times [R, V]) would outgrow what the C allocator keeps, and be
    mapped and zeroed anew by the operating system in every step.
    """
    count, vocabulary = arguments[0].shape
    rows = max(1, -(-_CHUNK_ELEMENTS // vocabulary))
    rows += -rows % 8
    if count <= rows:
        return function(*arguments)
    padding = -count % rows
    chunks = (count + padding) // rows

    def split(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, padding), *[(0, 0)] * (array.ndim - 1)))
        return padded.reshape(chunks, rows, *array.shape[1:])

    results = jax.lax.map(lambda chunk: function(*chunk), jax.tree.map(split, arguments))
    return jax.tree.map(lambda array: array.reshape(-1)[:count], results)


def _sample_rows(
    logits: jax.Array,
    rows: SampleRows,
    per_row: SequenceSampling,
    tables: SamplingTables,
    on_path: jax.Array,
    node_tokens: jax.Array,
    block_size: int,
) -> RowSample:
    """The sampler for some rows of a step; on_path bool[rows, R] and node_tokens int32[R] name their paths."""
    greedy = per_row.temperature == 0.0
    processed = jax.lax.cond(
        jnp.any(per_row.uses_tables),
        lambda: apply_tables(logits, rows, per_row, tables, on_path, node_tokens),
        lambda: logits,
    )
    scaled = processed / jnp.where(greedy, 1.0, per_row.temperature)[:, None]
    whole_lse = logsumexp(scaled)

    filtering = ~greedy & ((per_row.top_k > 0) | (per_row.top_p < 1.0) | (per_row.min_p > 0.0))

    def filtered() -> jax.Array:
        kept = kept_tokens(scaled, per_row.top_k, per_row.top_p, per_row.min_p)
        return jnp.where(kept | ~filtering[:, None], scaled, -jnp.inf)

    final = jax.lax.cond(jnp.any(filtering), filtered, lambda: scaled)

    tokens, final_lse = _gumbel_max(final, greedy, per_row.seeds, rows.positions, block_size)
    unchanged = ~jnp.any(per_row.uses_tables) & jnp.all(greedy | (per_row.temperature == 1.0))
    raw_lse = jax.lax.cond(unchanged, lambda: whole_lse, lambda: logsumexp(logits))
    return RowSample(
        tokens=tokens,
        logprobs=take(logits, tokens) - raw_lse,
        sampled_logprobs=jnp.where(greedy, 0.0, take(final, tokens) - final_lse),
        kept_mass=jnp.where(filtering, jnp.exp(jnp.minimum(final_lse - whole_lse, 0.0)), 1.0),
        target_logprobs=take(logits, rows.targets) - raw_lse,
    )


def drafted_ancestors(parents: jax.Array) -> jax.Array:
    """bool[R, R]: [i, j] is true where j is row i or an ancestor of it, and j is a draft node (not a root).

    By pointer doubling: after k rounds every row knows its ancestors less than 2**k levels up.
    """
    count = parents.shape[0]
    drafted = parents >= 0
    reach = jnp.eye(count, dtype=jnp.bool_) & drafted[:, None]
    jump = jnp.where(drafted, parents, -1)
    for _ in range(_doublings(count)):
        has_jump = jump >= 0
        target = jnp.where(has_jump, jump, 0)
        reach = reach | (reach[target] & has_jump[:, None])
        jump = jnp.where(has_jump, jump[target], -1)
    return reach


def holds_on_path(holds: jax.Array, parents: jax.Array) -> jax.Array:
    """bool[R]: whether `holds`, bool[R], is true of a row and all its ancestors that are draft nodes."""
    holds, jump = holds | (parents < 0), parents
    for _ in range(_doublings(parents.shape[0])):
        has_jump = jump >= 0
        target = jnp.where(has_jump, jump, 0)
        holds = holds & (holds[target] | ~has_jump)
        jump = jnp.where(has_jump, jump[target], -1)
    return holds


def _doublings(rows: int) -> int:
    """Rounds of pointer doubling until every row knows all its ancestors, of which a tree has 63 at most."""
    return max(1, min(rows, 64) - 1).bit_length()


def take(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]


def logsumexp(logits: jax.Array) -> jax.Array:
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return largest[:, 0] + jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1))


def apply_tables(
    logits: jax.Array,
    rows: SampleRows,
    per_row: SequenceSampling,
    tables: SamplingTables,
    on_path: jax.Array,
    node_tokens: jax.Array,
) -> jax.Array:
    """Penalties over prompt, output and the row's own path; bias, bad tokens, min_tokens. float32[rows, V]."""
    path_rows = jnp.broadcast_to(jnp.arange(on_path.shape[0])[:, None], on_path.shape)
    path_tokens = jnp.broadcast_to(node_tokens[None, :], on_path.shape)
    generated = tables.output_counts[per_row.slots].at[path_rows, path_tokens].add(on_path.astype(jnp.int32))
    flags = tables.flags[per_row.slots]

    seen = (generated > 0) | (flags & SEEN_IN_PROMPT > 0)
    penalty = per_row.repetition_penalty[:, None]
    out = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    out = out - per_row.frequency_penalty[:, None] * generated.astype(jnp.float32)
    out = out - per_row.presence_penalty[:, None] * (generated > 0)
    out = out + tables.bias[per_row.slots]
    too_early = rows.positions < per_row.stop_from_position
    out = jnp.where((flags & STOP_TOKEN > 0) & too_early[:, None], -jnp.inf, out)
    return jnp.where(per_row.uses_tables[:, None], out, logits)


def _gumbel_max(
    logits: jax.Array, greedy: jax.Array, seeds: jax.Array, positions: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Sampled token int32[R] and the log-sum-exp float32[R] of `logits`."""
    rows, vocabulary = logits.shape
    block_size = min(block_size, vocabulary)  # a single block's padding could never win
    num_blocks = -(-vocabulary // block_size)
    padded = jnp.pad(logits, ((0, 0), (0, num_blocks * block_size - vocabulary)), constant_values=-jnp.inf)
    blocks = padded.reshape(rows, num_blocks, block_size)
    block_max = jnp.max(blocks, axis=-1)
    safe_max = jnp.where(jnp.isneginf(block_max), 0.0, block_max)
    block_lse = safe_max + jnp.log(jnp.sum(jnp.exp(blocks - safe_max[..., None]), axis=-1))

    block_ids = jnp.broadcast_to(jnp.arange(num_blocks, dtype=jnp.int32), (rows, num_blocks))
    block_noise = gumbel(seeds, positions, BLOCK_LEVEL, block_ids)
    block_score = jnp.where(greedy[:, None], block_max, block_lse + block_noise)
    winner = jnp.argmax(block_score, axis=-1).astype(jnp.int32)

    inside = jnp.take_along_axis(blocks, winner[:, None, None], axis=1)[:, 0]
    token_ids = winner[:, None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
    token_noise = jnp.where(greedy[:, None], 0.0, gumbel(seeds, positions, TOKEN_LEVEL, token_ids))
    tokens = winner * block_size + jnp.argmax(inside + token_noise, axis=-1).astype(jnp.int32)
    return tokens, logsumexp(block_lse)


def count_outputs(
    tables: SamplingTables, slots: jax.Array, tokens: jax.Array, emitted: jax.Array
) -> SamplingTables:
    """Adds this step's emitted tokens to `output_counts`. slots, tokens int32[R]; emitted bool[R]."""
    counts = tables.output_counts.at[slots, tokens].add(emitted.astype(jnp.int32))
    return dataclasses.replace(tables, output_counts=counts)
