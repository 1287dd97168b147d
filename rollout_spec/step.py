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

from .cache_scales import scales_shape
from .kernels.compaction import move_cached_tokens
from .kernels.mla_attention import latent_pages_shape, mla_tree_attention
from .kernels.sampling import SamplingTables, count_outputs, tree_sample
from .kernels.tree_attention import kv_pages_shape, tree_paged_attention
from .kernels.tree_attention.quantize import is_scaled
from .look_ahead import LookAhead, draft, fill_caches, keep_states
from .models import ModelConfig, build
from .models.layers import Attend
from .sharding import MeshLayout
from .step_inputs import CAUSAL, StepBatch, StepShape, batch_layout, pack_results


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepState:
    """What lives on the device from step to step; donated to each step."""

    kv_pages: tuple[jax.Array, ...]  # one a layer, and one a head that drafts, of `cache_shape`
    tables: SamplingTables
    head_states: tuple[jax.Array, ...] = ()  # [pages, page_size, E], one a head that drafts but the last
    cache_scales: jax.Array | None = None  # float32[caches, 2, Hk] of an 8-bit cache, see `cache_scales.py`


def new_state(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    slots: int,
    dtype: jax.typing.DTypeLike,
    look_ahead: LookAhead | None = None,
    cache_dtype: jax.typing.DTypeLike | None = None,
) -> StepState:
    """An empty cache and empty tables. With `look_ahead` there is one page more, the last, which is nobody's.

    cache_dtype: of keys and values; None is `dtype`. Where it has 8 bits, scales are all 1 at first.
    """
    stored = dtype if cache_dtype is None else cache_dtype
    num_pages += look_ahead is not None
    heads = 0 if look_ahead is None else config.num_caches - config.num_layers
    kept = (num_pages, page_size, config.hidden_size)
    return StepState(
        kv_pages=new_cache(
            config, num_pages=num_pages, page_size=page_size, dtype=stored, count=config.num_layers + heads
        ),
        tables=SamplingTables(
            output_counts=jnp.zeros((slots, config.vocab_size), jnp.int32),
            flags=jnp.zeros((slots, config.vocab_size), jnp.uint8),
            bias=jnp.zeros((slots, config.vocab_size), jnp.float32),
        ),
        head_states=tuple(jnp.zeros(kept, dtype) for _ in range(heads - 1)),
        cache_scales=jnp.ones(scales_shape(config, heads)) if is_scaled(stored) else None,
    )


def new_cache(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: jax.typing.DTypeLike,
    count: int | None = None,
) -> tuple[jax.Array, ...]:
    """Empty pages, one array a layer, or `count`."""
    shape = cache_shape(config, num_pages=num_pages, page_size=page_size, dtype=dtype)
    return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers if count is None else count))


def cache_shape(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: jax.typing.DTypeLike
) -> tuple[int, ...]:
    """Shape of the pages of one layer."""
    if config.latent is not None:
        return latent_pages_shape(num_pages, page_size, config.latent.kv_rank, config.latent.rope_dim)
    return kv_pages_shape(num_pages, page_size, config.num_kv_heads, config.head_dim, dtype)


@functools.lru_cache(maxsize=64)
def compiled_step(
    config: ModelConfig,
    backend: str,
    sharding: jax.sharding.Sharding,
    mesh_layout: MeshLayout | None = None,
    slots: int = 0,
    look_ahead: LookAhead | None = None,
    scaled: bool = False,
) -> Callable[[dict, StepState, Any, StepShape, int], tuple[StepState, jax.Array]]:
    """The jitted step of a model, shared by all engines that run it on the same devices.

    sharding: of what isn't on a mesh, or is on all of its devices. slots: of the tables on a mesh. look_ahead: how
    the model's heads draft; None if they don't. scaled: whether the cache has 8 bits.
    Takes weights, state, the buffer of a HostBatch, and its sizes; returns the state and `pack_results`'s array.
    """

    def step(
        params: dict, state: StepState, buffer: jax.Array, shape: StepShape, pages: int
    ) -> tuple[StepState, jax.Array]:
        batch = batch_layout(shape, pages).unpack(buffer)
        if mesh_layout is None:
            return _step(config, backend, params, state, batch, None, look_ahead)
        with jax.sharding.use_abstract_mesh(mesh_layout.mesh.abstract_mesh):  # layers of experts look for it
            return _step(config, backend, params, state, batch, mesh_layout, look_ahead)

    out: Any = (
        sharding
        if mesh_layout is None
        else (
            state_sharding(mesh_layout, slots, look_ahead, scaled=scaled),
            sharding,
        )
    )
    return jax.jit(step, donate_argnums=1, static_argnums=(3, 4), out_shardings=out)


def state_sharding(
    mesh_layout: MeshLayout, slots: int, look_ahead: LookAhead | None = None, *, scaled: bool = False
) -> StepState:
    """Where the state lies on a mesh, as a tree like it."""
    cache: Any = mesh_layout.cache
    tables: Any = mesh_layout.tables(slots)
    everywhere: Any = mesh_layout.everywhere
    config = mesh_layout.config
    heads = 0 if look_ahead is None else config.num_caches - config.num_layers
    return StepState(
        kv_pages=(cache,) * (config.num_layers + heads),
        tables=SamplingTables(output_counts=tables, flags=tables, bias=tables),
        head_states=(everywhere,) * max(0, heads - 1),
        cache_scales=everywhere if scaled else None,
    )


def _step(
    config: ModelConfig,
    backend: str,
    params: dict,
    state: StepState,
    batch: StepBatch,
    mesh_layout: MeshLayout | None,
    look_ahead: LookAhead | None,
) -> tuple[StepState, jax.Array]:
    model = nnx.merge(build(config), params)
    pages = list(state.kv_pages)
    attend_to = functools.partial(
        attend_pages, config, backend=backend, mesh_layout=mesh_layout, scales=state.cache_scales
    )
    attend = attend_to(
        pages,
        kv_lens=batch.kv_lens,
        page_table=batch.page_table,
        cu_q_lens=batch.cu_q_lens,
        ancestors=batch.ancestors,
        num_seqs=batch.num_seqs,
    )
    trunk_states = model.trunk_states(batch.token_ids, batch.positions, attend)

    def unembed(hidden: jax.Array) -> jax.Array:
        logits = model.unembed(hidden)
        if mesh_layout is not None:  # whole rows are read; gathering the head instead would cost far more
            logits = jax.lax.with_sharding_constraint(logits, mesh_layout.logits)
            logits = jax.lax.with_sharding_constraint(logits, mesh_layout.everywhere)
        return logits

    logits = unembed(model.norm(trunk_states[batch.row_tokens]))
    mesh = None if mesh_layout is None else mesh_layout.mesh
    sample = tree_sample(logits, batch.rows, batch.sequences, state.tables, backend=backend, mesh=mesh)
    emitted = sample.accepted & batch.row_in_use
    tables = count_outputs(state.tables, batch.sequences.slots[batch.rows.sequences], sample.tokens, emitted)
    if look_ahead is None:
        kv_pages = _compact(backend, tuple(pages), batch, emitted, mesh_layout)
        return StepState(kv_pages, tables, (), state.cache_scales), pack_results(sample, None)
    states = fill_caches(model, batch, trunk_states, sample, state.head_states, attend)
    head_states = keep_states(batch, states, sample.accepted, state.head_states)
    kv_pages = _compact(backend, tuple(pages), batch, emitted, mesh_layout)
    one_each = functools.partial(_one_each, attend_to, batch.kv_lens.shape[0])
    drafts, kv_pages = draft(model, look_ahead, batch, sample, emitted, states, kv_pages, one_each, unembed)
    return StepState(kv_pages, tables, head_states, state.cache_scales), pack_results(sample, drafts)


def _one_each(
    attend_to: Callable[..., Attend],
    sequences: int,
    pages: tuple[jax.Array, ...],
    kv_lens: jax.Array,
    page_table: jax.Array,
) -> tuple[Attend, list[jax.Array]]:
    """The attention of one token of each sequence, and the pages that it replaces."""
    held = list(pages)
    attend = attend_to(
        held,
        kv_lens=kv_lens,
        page_table=page_table,
        cu_q_lens=jnp.arange(sequences + 1, dtype=jnp.int32),
        ancestors=jnp.full((sequences, 2), CAUSAL, jnp.uint32),
        num_seqs=jnp.full((1,), sequences, jnp.int32),
    )
    return attend, held


def attend_pages(
    config: ModelConfig,
    pages: list[jax.Array],
    *,
    kv_lens: jax.Array,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    ancestors: jax.Array,
    num_seqs: jax.Array,
    backend: str,
    mesh_layout: MeshLayout | None = None,
    scales: jax.Array | None = None,
) -> Attend:
    """The attention of `DecoderModel.hidden_states` over paged caches; replaces each layer's entry of `pages`.

    Arrays are those of `tree_paged_attention`; scales float32[caches, 2, Hk], of an 8-bit cache's keys and values.
    On a mesh each device attends with the heads that it holds.
    """
    where = (kv_lens, page_table, cu_q_lens, ancestors, num_seqs)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if config.latent is not None:
            rank = config.latent.kv_rank
            function: Callable[..., Any] = functools.partial(
                mla_tree_attention, scale=config.attention_scale, backend=backend
            )
            arrays: tuple[jax.Array, ...] = (
                q[..., :rank],
                q[..., rank:],
                k[:, 0, :rank],
                k[:, 0, rank:],
                pages[layer],
                *where,
            )
        else:
            function = functools.partial(
                tree_paged_attention if scales is None else _scaled_attention,
                scale=config.attention_scale,
                sliding_window=config.window(layer),
                soft_cap=config.attention_soft_cap,
                backend=backend,
            )
            arrays = (q, k, v, pages[layer], *where)
            if scales is not None:
                arrays = (*arrays, scales[layer, 0], scales[layer, 1])
        if mesh_layout is not None:
            latents, scaled = config.latent is not None, scales is not None
            function = mesh_layout.by_head(function, latents=latents, scaled=scaled)
        out, pages[layer] = function(*arrays)
        return out

    return attend


def _scaled_attention(*arrays: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    """`tree_paged_attention` that takes the scales of keys and values as its last two arrays."""
    *others, k_scale, v_scale = arrays
    attention: Callable[..., Any] = tree_paged_attention
    return attention(*others, k_scale=k_scale, v_scale=v_scale, **options)


def _compact(
    backend: str,
    pages: tuple[jax.Array, ...],
    batch: StepBatch,
    emitted: jax.Array,
    mesh_layout: MeshLayout | None,
) -> tuple[jax.Array, ...]:
    """Moves accepted nodes to the cache positions that their place in the text gives them."""
    drafted = batch.rows.parents >= 0
    destinations = jnp.where(emitted & drafted, batch.rows.positions - 1, -1)
    table = batch.page_table[batch.rows.sequences]
    needed = jnp.any((destinations >= 0) & (destinations != batch.row_sources))

    move_layer: Callable[..., jax.Array] = functools.partial(move_cached_tokens, backend=backend)
    if mesh_layout is not None:
        move_layer = mesh_layout.of_pages(move_layer)

    def move(carry: tuple[jax.Array, tuple[jax.Array, ...]]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        _, pages = carry
        moved = tuple(move_layer(layer, batch.row_sources, destinations, table) for layer in pages)
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
