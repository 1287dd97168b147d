"""The step: one jitted function from tokens to accepted tokens.

Forward over all tokens of the step (prompt chunks, roots, draft nodes), attention with the tree mask over the
paged cache, sampling at every root and node, the walk that accepts, and the moves that make the accepted keys
and values contiguous. Weights and sampling values are arguments and state is donated, so that it compiles once
for each StepShape and never again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .kernels.compaction import move_cached_tokens
from .kernels.sampling import SamplingTables, count_outputs, tree_sample
from .kernels.tree_attention import kv_pages_shape, tree_paged_attention
from .models import ModelConfig, build
from .step_inputs import StepBatch, StepShape, batch_layout, pack_sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepState:
    """What lives on the device from step to step; donated to each step."""

    kv_pages: tuple[jax.Array, ...]  # one a layer, of `kv_pages_shape`
    tables: SamplingTables


def new_state(
    config: ModelConfig, *, num_pages: int, page_size: int, slots: int, dtype: jax.typing.DTypeLike
) -> StepState:
    """An empty cache and empty tables."""
    shape = kv_pages_shape(num_pages, page_size, config.num_kv_heads, config.head_dim, dtype)
    return StepState(
        kv_pages=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
        tables=SamplingTables(
            output_counts=jnp.zeros((slots, config.vocab_size), jnp.int32),
            flags=jnp.zeros((slots, config.vocab_size), jnp.uint8),
            bias=jnp.zeros((slots, config.vocab_size), jnp.float32),
        ),
    )


@functools.lru_cache(maxsize=64)
def compiled_step(
    config: ModelConfig, backend: str, state_sharding: jax.sharding.Sharding
) -> Callable[[dict, StepState, Any, StepShape, int], tuple[StepState, jax.Array]]:
    """The jitted step of a model, shared by all engines that run it on the same devices.

    Takes weights, state, the buffer of a HostBatch, and its sizes; returns the state and `pack_sample`'s array.
    """

    def step(
        params: dict, state: StepState, buffer: jax.Array, shape: StepShape, pages: int
    ) -> tuple[StepState, jax.Array]:
        return _step(config, backend, params, state, batch_layout(shape, pages).unpack(buffer))

    return jax.jit(step, donate_argnums=1, static_argnums=(3, 4), out_shardings=state_sharding)


def _step(
    config: ModelConfig, backend: str, params: dict, state: StepState, batch: StepBatch
) -> tuple[StepState, jax.Array]:
    model = nnx.merge(build(config), params)
    pages = list(state.kv_pages)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out, pages[layer] = tree_paged_attention(
            q,
            k,
            v,
            pages[layer],
            batch.kv_lens,
            batch.page_table,
            batch.cu_q_lens,
            batch.ancestors,
            batch.num_seqs,
            scale=config.attention_scale,
            backend=backend,
        )
        return out

    hidden = model.hidden_states(batch.token_ids, batch.positions, attend)
    logits = model.unembed(hidden[batch.row_tokens])
    sample = tree_sample(logits, batch.rows, batch.sequences, state.tables)

    emitted = sample.accepted & batch.row_in_use
    tables = count_outputs(state.tables, batch.sequences.slots[batch.rows.sequences], sample.tokens, emitted)
    return StepState(_compact(backend, tuple(pages), batch, emitted), tables), pack_sample(sample)


def _compact(
    backend: str, pages: tuple[jax.Array, ...], batch: StepBatch, emitted: jax.Array
) -> tuple[jax.Array, ...]:
    """Moves accepted nodes to the cache positions that their place in the text gives them."""
    drafted = batch.rows.parents >= 0
    destinations = jnp.where(emitted & drafted, batch.rows.positions - 1, -1)
    table = batch.page_table[batch.rows.sequences]
    needed = jnp.any((destinations >= 0) & (destinations != batch.row_sources))

    def move(carry: tuple[jax.Array, tuple[jax.Array, ...]]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        _, pages = carry
        moved = tuple(
            move_cached_tokens(layer, batch.row_sources, destinations, table, backend=backend)
            for layer in pages
        )
        return jnp.bool_(False), moved

    # A loop of at most one round, not a cond: XLA updates a loop's carry in place, where a cond would copy.
    return jax.lax.while_loop(lambda carry: carry[0], move, (needed, pages))[1]


@functools.partial(jax.jit, donate_argnums=0)
def write_tables(
    tables: SamplingTables, slot: jax.Array, output_counts: jax.Array, flags: jax.Array, bias: jax.Array
) -> SamplingTables:
    """Sets one slot's rows; output_counts int32[V], flags uint8[V], bias float32[V]."""
    return SamplingTables(
        output_counts=tables.output_counts.at[slot].set(output_counts),
        flags=tables.flags.at[slot].set(flags),
        bias=tables.bias.at[slot].set(bias),
    )
