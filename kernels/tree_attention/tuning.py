"""How the Pallas kernel of tree attention cuts its work."""

from __future__ import annotations

from dataclasses import dataclass

LANES = 128
_BLOCK_BYTES = 2 << 20
"""Keys and values of a block; two are in flight, and the smallest chip has 16 MiB of vector memory."""
_SCORE_REGISTERS = 256
"""Registers of scores whose work is staged together: more spill more than the overlap gains."""


@dataclass(frozen=True)
class Blocks:
    """How the kernel cuts its work."""

    keys: int
    """Cached tokens a block."""
    heads: int
    """Key and value heads whose work is staged together."""
    query_tokens: int
    """Tokens a task at most."""


def choose_blocks(
    *,
    tokens_per_sequence: int,
    num_heads: int,
    num_kv_heads: int,
    page_bytes: int,
    page_size: int,
    pages_per_sequence: int,
) -> Blocks:
    """The blocks for a call. page_bytes: keys and values of one page; tokens_per_sequence: on average."""
    keys = 512
    longest = pages_per_sequence * page_size
    while keys > page_size and (keys // page_size * page_bytes > _BLOCK_BYTES or keys >= 2 * longest):
        keys //= 2
    group = num_heads // num_kv_heads
    query_tokens = max(8, min(64, 256 // group // 8 * 8))
    tile = min(query_tokens, tokens_per_sequence)
    registers = -(-tile * group // 8) * (keys // min(keys, LANES))
    return Blocks(
        keys=keys, heads=max(1, min(num_kv_heads, _SCORE_REGISTERS // registers)), query_tokens=query_tokens
    )
