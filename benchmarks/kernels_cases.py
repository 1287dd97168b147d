"""The calls of TPU kernels that are compiled and counted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rollout_spec.kernels import kv_pages_shape, latent_pages_shape, mla_tree_attention, move_cached_tokens
from rollout_spec.kernels.sampling import SampleRows, SamplingTables, SequenceSampling, tree_sample
from rollout_spec.kernels.tree_attention import tree_paged_attention

Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

SEQUENCES = 16
CACHED_TOKENS = 2048
PAGE_SIZE = 64


def attention(
    *,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sequences: int = SEQUENCES,
    page_size: int = PAGE_SIZE,
    dtype: Any = jnp.bfloat16,
    cache_dtype: Any = jnp.bfloat16,
    sinks: bool = False,
    **options: Any,
) -> Case:
    """A call of `tokens` tokens for each of `sequences` sequences with CACHED_TOKENS cached."""
    array = jax.ShapeDtypeStruct
    total, pages = sequences * tokens, -(-(CACHED_TOKENS + tokens) // page_size)
    arguments = (
        array((total, num_heads, head_dim), dtype),
        array((total, num_kv_heads, head_dim), dtype),
        array((total, num_kv_heads, head_dim), dtype),
        array(kv_pages_shape(sequences * pages, page_size, num_kv_heads, head_dim, cache_dtype), cache_dtype),
        array((sequences,), jnp.int32),
        array((sequences, pages), jnp.int32),
        array((sequences + 1,), jnp.int32),
        array((total, 2), jnp.uint32),
        array((1,), jnp.int32),
        *([array((num_heads,), jnp.float32)] if sinks else []),
    )
    call = functools.partial(tree_paged_attention, scale=head_dim**-0.5, backend="pallas", **options)

    def with_sinks(*given: Any) -> Any:
        return call(*given[:9], sinks=given[9])

    return (with_sinks if sinks else call), arguments, {"donate_argnums": 3}


def latent_attention(*, tokens: int, num_heads: int, sequences: int = SEQUENCES) -> Case:
    """The same over DeepSeek's latent cache, in bf16."""
    array, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    total, pages = sequences * tokens, -(-(CACHED_TOKENS + tokens) // PAGE_SIZE)
    arguments = (
        array((total, num_heads, 512), bf16),
        array((total, num_heads, 64), bf16),
        array((total, 512), bf16),
        array((total, 64), bf16),
        array(latent_pages_shape(sequences * pages, PAGE_SIZE, 512, 64), bf16),
        array((sequences,), jnp.int32),
        array((sequences, pages), jnp.int32),
        array((sequences + 1,), jnp.int32),
        array((total, 2), jnp.uint32),
        array((1,), jnp.int32),
    )
    return (
        functools.partial(mla_tree_attention, scale=192**-0.5, backend="pallas"),
        arguments,
        {"donate_argnums": 4},
    )


def compaction(*, entries: int = 128, dtype: Any = jnp.bfloat16) -> Case:
    """Moves in the cache of Qwen3-8B or Llama-3.1-8B."""
    array = jax.ShapeDtypeStruct
    places = array((entries,), jnp.int32)
    pages = array(kv_pages_shape(600, PAGE_SIZE, 8, 128, dtype), dtype)
    call = functools.partial(move_cached_tokens, backend="pallas")
    return call, (pages, places, places, array((entries, 40), jnp.int32)), {"donate_argnums": 0}


def sampling(*, rows: int = 128, vocabulary: int = 151_936) -> Case:
    """Sampling at the nodes of 16 trees of 8, with whatever parameters."""
    array = jax.ShapeDtypeStruct
    row, sequence = array((rows,), jnp.int32), array((SEQUENCES,), jnp.float32)
    count = array((SEQUENCES,), jnp.int32)
    arguments = (
        array((rows, vocabulary), jnp.float32),
        SampleRows(row, row, row, row, row),
        SequenceSampling(
            slots=count,
            seeds=array((SEQUENCES, 2), jnp.uint32),
            temperature=sequence,
            top_k=count,
            top_p=sequence,
            min_p=sequence,
            repetition_penalty=sequence,
            presence_penalty=sequence,
            frequency_penalty=sequence,
            stop_from_position=count,
            uses_tables=array((SEQUENCES,), jnp.bool_),
        ),
        SamplingTables(
            array((SEQUENCES, vocabulary), jnp.int32),
            array((SEQUENCES, vocabulary), jnp.uint8),
            array((SEQUENCES, vocabulary), jnp.float32),
        ),
    )
    return functools.partial(tree_sample, backend="pallas"), arguments, {}


_llama = functools.partial(attention, num_heads=32, num_kv_heads=8, head_dim=128)
_gemma = functools.partial(attention, num_heads=8, num_kv_heads=4, head_dim=256)

MEASURED: dict[str, Callable[[], Case]] = {
    "A": lambda: _llama(tokens=8),
    "B": lambda: _llama(tokens=64),
    "C": lambda: _llama(tokens=1),
    "D": lambda: latent_attention(tokens=8, num_heads=16),
}
MODELS: dict[str, Callable[[], Case]] = {
    "Qwen3-8B, trees": lambda: _llama(tokens=8, page_size=16),
    "Llama-3.1-8B, single tokens": lambda: _llama(tokens=1, page_size=128),
    "Llama-3.1-8B, prompt": lambda: _llama(tokens=512, sequences=2),
    "Qwen3-30B-A3B": lambda: attention(tokens=8, num_heads=32, num_kv_heads=4, head_dim=128),
    "Gemma-3-4B, window": lambda: _gemma(tokens=8, sliding_window=1024),
    "Gemma-3-4B, float32": lambda: _gemma(tokens=8, dtype=jnp.float32, cache_dtype=jnp.float32, page_size=32),
    "heads of 64, sinks and soft cap": lambda: attention(
        tokens=8, num_heads=64, num_kv_heads=8, head_dim=64, sinks=True, soft_cap=30.0, sliding_window=128
    ),
    "DeepSeek-V3, single tokens": lambda: latent_attention(tokens=1, num_heads=16),
    "moves": lambda: compaction(),
    "moves, int8": lambda: compaction(dtype=jnp.int8),
    "sampling, 152k": lambda: sampling(),
    "sampling, 256k": lambda: sampling(vocabulary=262_144),
    "int8 cache": lambda: _llama(tokens=8, cache_dtype=jnp.int8, page_size=32, k_scale=0.1, v_scale=0.1),
    "fp8 cache": lambda: _llama(tokens=8, cache_dtype=jnp.float8_e4m3fn, k_scale=0.1, v_scale=0.1),
}
CASES = MEASURED | MODELS


def _hbm_bytes(*, tokens: int, token_bytes: int, query_bytes: int, out_bytes: int) -> tuple[int, int]:
    """(what a bf16 call moves between HBM and core, the least possible), in bytes.

    token_bytes: of a token's cache row; query_bytes and out_bytes: of a token. The least reads each live page, the
    queries and the new rows once, and writes the output and the new rows. The kernel also reads and writes whole
    groups of 16 rows where new ones lie, and 512 bytes a token that say what it sees.
    """
    pages = -(-(CACHED_TOKENS + tokens) // PAGE_SIZE)
    least = pages * PAGE_SIZE * token_bytes + tokens * (2 * token_bytes + query_bytes + out_bytes)
    groups, replaced_whole = -(-tokens // 16), tokens // 16
    moved = least - tokens * token_bytes + (2 * groups - replaced_whole) * 16 * token_bytes + tokens * 512
    return SEQUENCES * moved, SEQUENCES * least


_grouped_bytes = functools.partial(
    _hbm_bytes, token_bytes=2 * 8 * 128 * 2, query_bytes=32 * 128 * 2, out_bytes=32 * 128 * 2
)
HBM_BYTES = {
    "A": _grouped_bytes(tokens=8),
    "B": _grouped_bytes(tokens=64),
    "C": _grouped_bytes(tokens=1),
    # 576 numbers would do for a row and a query; both are padded to 640.
    "D": (
        _hbm_bytes(tokens=8, token_bytes=640 * 2, query_bytes=16 * 640 * 2, out_bytes=16 * 512 * 2)[0],
        _hbm_bytes(tokens=8, token_bytes=576 * 2, query_bytes=16 * 576 * 2, out_bytes=16 * 512 * 2)[1],
    ),
}
