"""The plain noise against published vectors, JAX's threefry and the distribution it must have."""

from __future__ import annotations

import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from tests.helpers.plain_noise import LEVEL_BLOCK, LEVEL_TOKEN, derive_seed, gumbel, threefry2x32


# Known-answer tests of Random123 (kat_vectors, threefry2x32 20 rounds).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_words(
    counter: tuple[int, int], key: tuple[int, int], expected: tuple[int, int]
) -> None:
    words = threefry2x32(key, counter)
    assert (int(words[0][0]), int(words[1][0])) == expected


def test_threefry_agrees_with_jax() -> None:
    rng = np.random.default_rng(0)
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    counters = rng.integers(0, 2**32, (2, 500), dtype=np.uint32)
    ours = threefry2x32((int(key[0]), int(key[1])), (counters[0], counters[1]))
    theirs = np.asarray(threefry_2x32(key, counters.reshape(-1)))
    np.testing.assert_array_equal(np.concatenate(ours), theirs)


def test_noise_is_gumbel_and_fresh_at_every_position_level_and_seed() -> None:
    index = np.arange(2000)
    draws = [
        gumbel(seed, position, level, index)
        for seed in (0, 1, 2**32, 2**63 - 1)
        for position in (0, 1)
        for level in (LEVEL_BLOCK, LEVEL_TOKEN)
    ]
    assert len({draw.tobytes() for draw in draws}) == len(draws)
    assert stats.kstest(np.concatenate(draws), "gumbel_r").pvalue > 1e-3
    assert np.abs(np.corrcoef(draws) - np.eye(len(draws))).max() < 0.1


def test_derived_seeds_are_splitmix64() -> None:
    # First outputs of the reference splitmix64.c seeded with 1234567, without their top bit.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [derive_seed(1234567, i) for i in (1, 2, 3)] == [z & (2**63 - 1) for z in published]
    assert derive_seed(77, 0) == 77
