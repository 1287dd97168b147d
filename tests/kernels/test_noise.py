"""The noise is the published generator's, and as fine as rare tokens need."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_spec.kernels.sampling.noise import BLOCK_LEVEL, TOKEN_LEVEL, gumbel, threefry2x32

from tests.helpers import plain_noise

# Known answers of Threefry-2x32-20 from Random123's kat_vectors: key, counter, result.
KNOWN_ANSWERS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN_ANSWERS)
def test_threefry_known_answers(
    key: tuple[int, int], counter: tuple[int, int], words: tuple[int, int]
) -> None:
    found = threefry2x32(
        (jnp.uint32(key[0]), jnp.uint32(key[1])), (jnp.uint32(counter[0]), jnp.uint32(counter[1]))
    )
    assert tuple(int(word) for word in found) == words


def test_each_row_has_the_noise_of_its_seed_and_position_at_both_levels() -> None:
    rng = np.random.default_rng(0)
    seeds = [0, 1, 2**32, 2**63 - 1, *(int(seed) for seed in rng.integers(2**63, size=8))]
    positions = rng.integers(0, 2**20, len(seeds))
    indices = rng.integers(0, 2**31, (len(seeds), 50))
    words = np.array([(seed & 0xFFFFFFFF, seed >> 32) for seed in seeds], np.uint32)
    for level, plain_level in (
        (BLOCK_LEVEL, plain_noise.LEVEL_BLOCK),
        (TOKEN_LEVEL, plain_noise.LEVEL_TOKEN),
    ):
        found = gumbel(words, jnp.asarray(positions, jnp.int32), level, jnp.asarray(indices, jnp.int32))
        assert found.dtype == jnp.float32
        expected = [
            plain_noise.gumbel(seed, int(position), plain_level, row)
            for seed, position, row in zip(seeds, positions, indices, strict=True)
        ]
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=2e-6)


def test_noise_has_the_moments_and_the_tails_of_a_gumbel_variable() -> None:
    draws = jax.jit(gumbel, static_argnums=2)(
        jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), TOKEN_LEVEL, jnp.arange(2_000_000)[None]
    )
    noise = np.asarray(draws, np.float64)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 5 * np.sqrt(np.pi**2 / 6 / noise.size)
    assert abs(noise.var() - np.pi**2 / 6) < 0.02
    for probability in (1e-5, 1e-4, 1e-2):  # P(noise > x) = 1 - exp(-exp(-x))
        above = (noise > -np.log(-np.log1p(-probability))).mean()
        assert abs(above - probability) < 5 * np.sqrt(probability / noise.size)
