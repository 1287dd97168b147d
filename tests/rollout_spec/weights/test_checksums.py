"""The checksum of weights: the same however they are sent, another once a bit differs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.errors import WeightUpdateError
from rollout_spec.weights import checksum, to_hf
from rollout_spec.weights.checksums import sums_of
from tests.rollout_spec.weights.staged import NEW, OLD, hf_arrays


def plain_sums(array: np.ndarray) -> list[int]:
    """The two sums by whole numbers of Python."""

    def mix(mixed: int) -> int:
        for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            mixed = (mixed ^ (mixed >> shift)) * multiplier % 2**32
        return mixed ^ (mixed >> 16)

    def factor(index: int, salt: int) -> int:
        return mix((index + salt) % 2**32) | 1

    rows = array.reshape(-1, array.shape[-1])
    bits = rows.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize]).tolist()
    salts = ((0x9E3779B9, 0x7F4A7C15), (0xF39CC060, 0x5CEDC834))
    return [
        sum(
            mix(value) * factor(row, first) * factor(column, second)
            for row, values in enumerate(bits)
            for column, value in enumerate(values)
        )
        % 2**32
        for first, second in salts
    ]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(1,), (37,), (5, 11)])
def test_the_sums_are_what_plain_arithmetic_gives(shape: tuple[int, ...], dtype: Any) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    assert sums_of(array).tolist() == plain_sums(array)


def test_every_form_has_the_same_checksum() -> None:
    expected = checksum(NEW.config, NEW.params)
    assert len(expected) == 32
    assert checksum(NEW.config, hf_arrays()) == expected
    assert checksum(NEW.config, to_hf(NEW.config, NEW.params)) == expected
    assert checksum(NEW.config, reversed(list(hf_arrays().items()))) == expected
    assert checksum(OLD.config, OLD.params) != expected


def test_it_is_of_the_numbers_as_the_engine_rounds_them() -> None:
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), NEW.params)
    expected = checksum(NEW.config, NEW.params, jnp.bfloat16)
    assert checksum(NEW.config, rounded, jnp.bfloat16) == expected
    assert checksum(NEW.config, NEW.params) != expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 31))
def test_any_one_bit_changes_it(place: int, bit: int) -> None:
    array = np.array(NEW.params["layers"][0]["mlp"]["up_proj"]["kernel"])
    before = sums_of(array).tolist()
    array.reshape(-1).view(np.uint32)[place % array.size] ^= np.uint32(1 << bit)
    after = sums_of(array).tolist()
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_rows_and_columns_that_change_places_change_it() -> None:
    array = np.array(NEW.params["layers"][0]["mlp"]["up_proj"]["kernel"])
    seen = {tuple(sums_of(array).tolist())}
    for changed in (array[::-1], array[:, ::-1], np.roll(array, 1, 0), np.roll(array, 1, 1), array * -1):
        seen.add(tuple(sums_of(np.ascontiguousarray(changed)).tolist()))
    assert len(seen) == 6


def test_weights_that_are_not_whole_have_none() -> None:
    arrays: dict[str, Any] = hf_arrays()
    arrays.pop("model.norm.weight")
    arrays["foo"] = np.zeros(2)
    arrays["model.layers.0.mlp.up_proj.weight"] = np.zeros((2, 2))
    with pytest.raises(WeightUpdateError) as raised:
        checksum(NEW.config, arrays)
    for word in ("missing: norm.scale", "foo", "(2, 2)"):
        assert word in str(raised.value)
