"""What the Pallas kernel of the sampler supports, checked before anything is compiled."""

from __future__ import annotations

from rollout_spec.kernels.backend import device_kind

from rollout_spec.errors import KernelLimitError

BLOCK = 256
"""Tokens of a block of the sampler that the kernel supports."""
TILE_ROWS = 8
CHUNK = 1024
"""Tokens that a pass takes at a time: eight registers."""
_VECTOR_MEMORY = 48 << 20
_VECTOR_MEMORY_V4 = 15 << 20


def check_limits(vocabulary: int, block_size: int) -> None:
    """Raises KernelLimitError where the kernel doesn't support the vocabulary or the sampler's block."""
    if min(block_size, vocabulary) != min(BLOCK, vocabulary):
        raise KernelLimitError(
            f"tree_sample's kernel has blocks of {BLOCK} tokens; got block_size={block_size}: "
            "use that, or backend='reference'"
        )
    most = most_tokens()
    if vocabulary > most:
        raise KernelLimitError(
            f"tree_sample's kernel holds {TILE_ROWS} rows of at most {most:,} logits in vector memory here; got "
            f"{vocabulary:,}: use backend='reference'"
        )


def most_tokens() -> int:
    """Of a vocabulary, so that a tile of rows fits vector memory."""
    return tile_bytes() // (TILE_ROWS * 4) // CHUNK * CHUNK


def tile_bytes() -> int:
    """Of vector memory for tiles of rows, on the chip that is traced for."""
    return _VECTOR_MEMORY_V4 if device_kind().startswith("tpu v4") else _VECTOR_MEMORY
