"""The engine's noise, written again in numpy from the published algorithms: nothing here is shared with it.

Threefry-2x32 with 20 rounds: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
The finaliser of splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]
Float32Array = npt.NDArray[np.float32]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = np.uint32(0x1BD11BDA)
_MASK_64 = 2**64 - 1
_MASK_63 = 2**63 - 1

LEVEL_BLOCK = 0  # the draw among blocks of the vocabulary
LEVEL_TOKEN = 1  # the draw among the tokens of the block that won


def _rotate_left(x: UInt32Array, bits: int) -> UInt32Array:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def threefry2x32(
    key: tuple[int, int], counter: tuple[npt.ArrayLike, npt.ArrayLike]
) -> tuple[UInt32Array, UInt32Array]:
    """The two output words of Threefry-2x32-20, elementwise over counters uint32[...]."""
    key_words = [np.uint32(key[0]), np.uint32(key[1])]
    key_words.append(key_words[0] ^ key_words[1] ^ _KEY_PARITY)
    x0, x1 = (np.atleast_1d(np.asarray(word, dtype=np.uint32)) for word in counter)
    x0, x1 = np.broadcast_arrays(x0, x1)
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2**32
        x0, x1 = x0 + key_words[0], x1 + key_words[1]
        for group in range(5):
            for bits in _ROTATIONS[group % 2]:
                x0 = x0 + x1
                x1 = _rotate_left(x1, bits) ^ x0
            x0 = x0 + key_words[(group + 1) % 3]
            x1 = x1 + key_words[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def gumbel(seed: int, position: int, level: int, index: npt.ArrayLike) -> Float32Array:
    """Standard Gumbel noise float32[N] of `index` int[N] at one position of a request."""
    counter_low = (np.uint32(level) << np.uint32(31)) | np.asarray(index, dtype=np.uint32)
    high, low = threefry2x32((seed & 0xFFFFFFFF, seed >> 32), (np.uint32(position), counter_low))
    uniform = high.astype(np.float32) * np.float32(2.0**-32)
    uniform = uniform + (low.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-64)
    uniform = np.minimum(uniform, np.float32(1 - 2.0**-24))
    exponential = -np.log1p(-uniform.astype(np.float64))
    return (-np.log(exponential)).astype(np.float32)


def derive_seed(seed: int, sample: int) -> int:
    """Seed of sample number `sample` of a request whose seed is `seed`; sample 0 has the request's own."""
    if sample == 0:
        return seed
    z = (seed + sample * 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (z ^ (z >> 31)) & _MASK_63
