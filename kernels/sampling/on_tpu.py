"""`tree_sample` with the kernel for rows: what goes in, and the few numbers a row that are left to XLA afterwards."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from rollout_spec.kernels.backend import interpret_mode

from .inputs import SampleRows, SamplingTables, SequenceSampling, TreeSample
from .limits import TILE_ROWS
from .reference import RowSample, apply_tables, drafted_ancestors, holds_on_path, in_chunks, logsumexp, take


def tree_sample_pallas(
    logits: jax.Array,
    rows: SampleRows,
    sequences: SequenceSampling,
    tables: SamplingTables,
    mesh: Mesh | None,
) -> TreeSample:
    """See `rollout_spec.kernels.tree_sample`.

    Where no row needs tables, logits go into the kernel as they are. Otherwise XLA applies the tables to some rows at a
    time, as the reference does.
    """

    def plainly() -> RowSample:
        per_row = jax.tree.map(lambda field: field[rows.sequences], sequences)
        return _sample(logits, logits, rows, per_row, mesh)

    def with_tables() -> RowSample:
        on_path = drafted_ancestors(rows.parents)

        def chunk(logits: jax.Array, rows_here: SampleRows, on_path: jax.Array) -> RowSample:
            per_row = jax.tree.map(lambda field: field[rows_here.sequences], sequences)
            processed = apply_tables(logits, rows_here, per_row, tables, on_path, rows.token_ids)
            return _sample(logits, processed, rows_here, per_row, mesh)

        return in_chunks(chunk, (logits, rows, on_path))

    found = jax.lax.cond(jnp.any(sequences.uses_tables[rows.sequences]), with_tables, plainly)
    foretold = found.tokens[jnp.maximum(rows.parents, 0)] == rows.token_ids
    return TreeSample(**found._asdict(), accepted=holds_on_path(foretold, rows.parents))


def _sample(
    logits: jax.Array, processed: jax.Array, rows: SampleRows, per_row: SequenceSampling, mesh: Mesh | None
) -> RowSample:
    from .pallas import sample_rows  # Pallas takes a while to import

    greedy = per_row.temperature == 0.0
    filtering = ~greedy & ((per_row.top_k > 0) | (per_row.top_p < 1.0) | (per_row.min_p > 0.0))
    sample = functools.partial(sample_rows, interpret=interpret_mode())
    if mesh is not None:
        shared = logits.shape[0] % (TILE_ROWS * mesh.size) == 0
        split = PartitionSpec(mesh.axis_names if shared else None)
        sample = jax.shard_map(sample, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    found = sample(
        processed,
        per_row.seeds,
        rows.positions,
        per_row.temperature,
        per_row.top_k,
        per_row.top_p,
        per_row.min_p,
    )
    raw_lse = found.raw_lse if processed is logits else logsumexp(logits)
    chosen = take(processed, found.tokens) / jnp.where(greedy, 1.0, per_row.temperature)
    return RowSample(
        tokens=found.tokens,
        logprobs=take(logits, found.tokens) - raw_lse,
        sampled_logprobs=jnp.where(greedy, 0.0, chosen - found.final_lse),
        kept_mass=jnp.where(filtering, jnp.exp(jnp.minimum(found.final_lse - found.whole_lse, 0.0)), 1.0),
        target_logprobs=take(logits, rows.targets) - raw_lse,
    )
