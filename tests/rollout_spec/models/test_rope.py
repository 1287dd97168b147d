"""Rotary frequencies of each kind, at the places where their formulas are known in closed form."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rollout_spec.models import ModelConfig, RopeConfig
from rollout_spec.models.rope import inverse_frequencies, rotary_table, rotate, yarn_attention_factor

PLAIN = inverse_frequencies(RopeConfig(theta=10_000.0), 64)


def test_default_frequencies_are_powers_of_theta() -> None:
    np.testing.assert_allclose(PLAIN, [10_000.0 ** (-2 * d / 64) for d in range(32)], rtol=1e-6)
    assert PLAIN.dtype == np.float32


def test_linear_divides_all_frequencies() -> None:
    scaled = inverse_frequencies(RopeConfig("linear", 10_000.0, 4.0), 64)
    np.testing.assert_allclose(scaled, PLAIN / 4, rtol=1e-6)


def test_dynamic_keeps_the_frequencies_and_limits_the_length() -> None:
    rope = RopeConfig("dynamic", 10_000.0, 4.0, original_max_position_embeddings=2048)
    np.testing.assert_array_equal(inverse_frequencies(rope, 64), PLAIN)
    assert rope.max_length == 2048
    config = ModelConfig("llama", 8, 8, 8, 1, 1, 1, 8, max_position_embeddings=9000, rope=rope)
    assert config.max_length == 2048


def test_llama3_keeps_short_wavelengths_and_divides_long_ones() -> None:
    rope = RopeConfig("llama3", 10_000.0, 8.0, 1024, low_freq_factor=1.0, high_freq_factor=4.0)
    scaled, wavelengths = inverse_frequencies(rope, 64), 2 * np.pi / PLAIN
    short, long = wavelengths < 1024 / 4, wavelengths > 1024
    assert all(group.any() for group in (short, long, ~short & ~long))
    np.testing.assert_allclose(scaled[short], PLAIN[short], rtol=1e-6)
    np.testing.assert_allclose(scaled[long], PLAIN[long] / 8, rtol=1e-6)
    between = scaled[~short & ~long] / PLAIN[~short & ~long]
    assert ((between > 1 / 8) & (between < 1)).all()
    assert (np.diff(between) < 0).all()


def test_yarn_keeps_fast_dimensions_and_divides_slow_ones() -> None:
    rope = RopeConfig("yarn", 10_000.0, 4.0, 1024)
    scaled, turns = inverse_frequencies(rope, 64), 1024 * PLAIN / (2 * np.pi)
    ratio = scaled / PLAIN
    # Rounding the ramp's ends to whole dimensions widens it by at most one, a factor of 1.33 in turns.
    np.testing.assert_allclose(ratio[turns > 32 * 1.34], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 1 / 1.34], 1 / 4, rtol=1e-6)
    assert (np.diff(ratio) <= 1e-7).all()


def test_yarn_attention_factor_follows_the_paper_and_deepseek() -> None:
    assert yarn_attention_factor(1.0) == 1.0
    assert yarn_attention_factor(4.0) == pytest.approx(0.1 * np.log(4) + 1)
    assert yarn_attention_factor(40.0, 1.0, 1.0) == 1.0
    assert yarn_attention_factor(40.0, 0.707, None) == yarn_attention_factor(40.0)
    expected = (0.1 * 2 * np.log(40) + 1) / (0.1 * 0.5 * np.log(40) + 1)
    assert yarn_attention_factor(40.0, 2.0, 0.5) == pytest.approx(expected)


def test_given_factors_divide_each_frequency() -> None:
    factors = tuple(1.0 + d for d in range(32))
    scaled = inverse_frequencies(RopeConfig("factors", 10_000.0, frequency_factors=factors), 64)
    np.testing.assert_allclose(scaled, PLAIN / np.array(factors), rtol=1e-6)


def test_rotation_turns_the_pairs_of_both_halves() -> None:
    """Each pair (d, d + D/2), read as a complex number, is multiplied by exp(i position frequency)."""
    rope, positions = RopeConfig(theta=100.0), np.array([0, 1, 17], dtype=np.int32)
    heads = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)
    turned = rotate(jnp.asarray(heads), rotary_table(jnp.asarray(positions), rope, 8))
    angles = positions[:, None, None] * inverse_frequencies(rope, 8)
    expected = (heads[..., :4] + 1j * heads[..., 4:]) * np.exp(1j * angles)
    np.testing.assert_allclose(turned[..., :4], expected.real, atol=1e-5)
    np.testing.assert_allclose(turned[..., 4:], expected.imag, atol=1e-5)


def test_attention_factor_scales_cosine_and_sine() -> None:
    positions = jnp.array([3], dtype=jnp.int32)
    plain = rotary_table(positions, RopeConfig(), 8)
    scaled = rotary_table(positions, RopeConfig("yarn", 10_000.0, 1.0, 64, attention_factor=1.5), 8)
    for before, after in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(after, 1.5 * before, rtol=1e-5)
