"""Putting a checkpoint's tensors together."""

from __future__ import annotations

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_spec.errors import ModelLoadError
from rollout_spec.loading.checkpoint import LazyTensor, assemble
from rollout_spec.models import ModelConfig, init_params
from rollout_spec.weights import expected_names, to_hf

CONFIG = ModelConfig("llama", 40, 16, 24, 2, 4, 2, 8, 64)
TENSORS = {name: np.asarray(array) for name, array in to_hf(CONFIG, init_params(CONFIG))}


def test_tensors_are_read_once_and_released_before_the_next() -> None:
    read: list[str] = []
    sources: list[weakref.ref[np.ndarray]] = []

    def lazy(name: str) -> LazyTensor:
        def read_copy() -> np.ndarray:
            assert not any(source() is not None for source in sources)
            read.append(name)
            array = TENSORS[name].copy()
            sources.append(weakref.ref(array))
            return array

        return LazyTensor(TENSORS[name].shape, read_copy)

    params = assemble(CONFIG, {name: lazy(name) for name in TENSORS}, np.float32)
    assert sorted(read) == sorted(expected_names(CONFIG))
    for got, expected in zip(jax.tree.leaves(params), jax.tree.leaves(init_params(CONFIG)), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_params_do_not_share_memory_with_what_was_read() -> None:
    table = TENSORS["model.embed_tokens.weight"].copy()
    tensors = {name: LazyTensor(array.shape, lambda array=array: array) for name, array in TENSORS.items()}
    tensors["model.embed_tokens.weight"] = LazyTensor(table.shape, lambda: table)
    params = assemble(CONFIG, tensors, jnp.float32)
    table[:] = 0
    assert (params["embed_tokens"]["embedding"] != 0).any()


def test_nothing_is_read_from_a_checkpoint_that_does_not_fit() -> None:
    def fail() -> np.ndarray:
        raise AssertionError("read")

    tensors = {name: LazyTensor(array.shape, fail) for name, array in TENSORS.items()}
    del tensors["model.norm.weight"]
    with pytest.raises(ModelLoadError, match=r"1 fault:\n  missing: model\.norm\.weight \(16,\)"):
        assemble(CONFIG, tensors, np.float32)
