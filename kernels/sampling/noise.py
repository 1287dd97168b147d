"""Counter-based Gumbel noise: a pure function of (seed, position, level, index).

The bits come from Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), written in plain integer operations so that they are the same on every platform.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK_LEVEL = 0
TOKEN_LEVEL = 1

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def _rotate_left(x: jax.Array, bits: int) -> jax.Array:
    return (x << jnp.uint32(bits)) | (x >> jnp.uint32(32 - bits))


def threefry2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32-20. All four inputs and both outputs are uint32 of one broadcast shape."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x0, x1 = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = _rotate_left(x1, rotation) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def gumbel(seeds: jax.Array, positions: jax.Array, level: int, indices: jax.Array) -> jax.Array:
    """Standard Gumbel noise.

    Args:
        seeds: uint32[R, 2], the low and high word of each row's seed.
        positions: int32[R], index of the sampled token in prompt + completion.
        level: BLOCK_LEVEL or TOKEN_LEVEL.
        indices: int32[R, N], block numbers or token ids, below 2**31.

    Returns:
        float32[R, N]. 64 bits of uniform stand behind each value, so that its upper tail, which decides
        whether a rare token wins, reaches as far as the distribution does for any vocabulary.
    """
    rows = (positions.shape[0], 1)
    key = (seeds[:, 0].reshape(rows), seeds[:, 1].reshape(rows))
    counter = (
        positions.astype(jnp.uint32).reshape(rows) + jnp.zeros_like(indices, jnp.uint32),
        indices.astype(jnp.uint32) | jnp.uint32(level << 31),
    )
    high, low = threefry2x32(key, counter)
    uniform = high.astype(jnp.float32) * jnp.float32(2.0**-32)
    uniform += (low.astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-64)
    uniform = jnp.minimum(uniform, jnp.float32(1.0 - 2.0**-24))
    # log1p(-u) keeps the precision of a small u, where the largest Gumbel values come from.
    return -jnp.log(-jnp.log1p(-uniform))
