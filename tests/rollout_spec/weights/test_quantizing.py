"""Weights of 8 bits: how they are rounded, and that updates, checksums and sleep mean what they mean without them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout_spec import RolloutEngine, SamplingParams
from rollout_spec.errors import WeightUpdateError
from rollout_spec.models.quantized import QuantizedArray, dense, is_quantized, leaves_of, quantize
from rollout_spec.weights import Adapter, checksum, to_hf
from tests.helpers.engines import new_engine
from tests.helpers.plain_quantized import plain_quantized
from tests.helpers.tiny_models import random_params, tiny_model
from tests.promises.test_no_recompilation import counting_compilations

MODEL = "qwen3_moe"
TYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


@functools.cache
def shared(weight_dtype: str = "int8") -> RolloutEngine:
    return new_engine(tiny_model(MODEL), "roomy", weight_dtype=weight_dtype)


def kept(engine: RolloutEngine) -> list[np.ndarray]:
    """All numbers that the engine computes with; what a checksum goes by is not among them."""
    leaves = jax.tree.leaves(engine._core.executor.params)
    return [np.asarray(leaf) for leaf in leaves if leaf.dtype != jnp.uint32]


def same(ours: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return all((one == other).all() for one, other in zip(ours, others, strict=True))


def tokens(engine: RolloutEngine) -> list[int]:
    sampling = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
    return engine.generate([[5, 6, 7, 8, 9]], sampling)[0].completions[0].token_ids.tolist()


@pytest.mark.parametrize("name", TYPES)
@given(seed=st.integers(0, 2**32 - 1), empty=st.integers(0, 9))
@example(seed=1938973, empty=0)  # its largest over 448 is rounded by XLA as numpy does not
@settings(max_examples=60, deadline=None)
def test_kernels_are_rounded_to_the_nearest_that_their_channel_holds(
    name: str, seed: int, empty: int
) -> None:
    rng = np.random.default_rng(seed)
    kernel = rng.standard_normal((7, 5)).astype(np.float32)
    kernel *= np.float32(10.0) ** rng.integers(-20, 20, 5).astype(np.float32)
    kernel[:, empty : empty + 1] = 0.0
    stored = QuantizedArray(*quantize(jnp.asarray(kernel), TYPES[name]), jnp.zeros(2, jnp.uint32))
    found = np.asarray(dense(stored, np.float32))
    expected = plain_quantized(kernel.T, name).T
    # Of two that are as near, either may be taken: the devices' divisions are not rounded alike.
    assert (np.abs(found - kernel.astype(np.float64)) <= np.abs(expected - kernel) * (1 + 1e-5)).all()
    assert np.mean(found != expected) < 0.1
    worst = np.abs(kernel).max(axis=0) * (0.5001 / 127 if name == "int8" else 0.0626)
    assert (np.abs(found - kernel) <= worst).all()
    again, scale = quantize(jnp.asarray(found), TYPES[name])
    assert (np.asarray(again) == np.asarray(stored.values)).all(), "rounding twice is rounding once"
    assert (np.asarray(scale) == np.asarray(stored.scale)).all()


def test_projections_and_experts_are_stored_in_8_bits_and_nothing_else_is() -> None:
    engine = shared()
    full = jax.tree_util.tree_flatten_with_path(tiny_model(MODEL).params)[0]
    for (path, leaf), stored in zip(full, leaves_of(engine._core.executor.params), strict=True):
        *_, module, kind = [str(key.key) for key in path]
        assert is_quantized(stored) == (kind == "kernel" and module.endswith("_proj")), path
        if is_quantized(stored):
            assert stored.values.dtype == jnp.int8
            assert stored.values.shape == leaf.shape
            assert stored.scale.shape == (*leaf.shape[:-2], leaf.shape[-1])


def test_params_look_like_those_that_were_given_and_pushing_them_back_changes_nothing() -> None:
    engine, given_params = shared(), tiny_model(MODEL).params
    engine.update_weights(given_params)
    before = kept(engine)
    shapes: Any = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (engine.params, given_params))
    assert shapes[0] == shapes[1]
    engine.update_weights(engine.params)
    assert same(kept(engine), before)


@pytest.mark.parametrize("weight_dtype", TYPES)
def test_a_checksum_is_that_of_the_weights_that_were_sent(weight_dtype: str) -> None:
    engine, model = shared(weight_dtype), tiny_model(MODEL)
    other = random_params(model.config, 7)
    report = engine.update_weights(dict(to_hf(model.config, other)), checksum=checksum(model.config, other))
    assert engine.checksum() == report.checksum == checksum(model.config, other)
    with pytest.raises(WeightUpdateError, match="checksum"):
        engine.update_weights(model.params, checksum=report.checksum)
    engine.update_weights(model.params)
    assert report.checksum == checksum(model.config, other), "it outlives the weights"
    assert not engine.update_weights(other, version=engine.weight_version).applied
    assert engine.checksum() == checksum(model.config, model.params)


def test_an_update_of_some_weights_leaves_the_others_as_they_are() -> None:
    engine, model = shared(), tiny_model(MODEL)
    engine.update_weights(model.params)
    before = leaves_of(jax.tree.map(np.asarray, engine._core.executor.params))
    other = dict(to_hf(model.config, random_params(model.config, 7)))
    name = next(key for key in other if key.endswith("0.self_attn.q_proj.weight"))
    engine.update_weights({name: other[name]}, strict=False)
    after = leaves_of(jax.tree.map(np.asarray, engine._core.executor.params))
    changed = [
        not same(jax.tree.leaves(one), jax.tree.leaves(two)) for one, two in zip(before, after, strict=True)
    ]
    assert sum(changed) == 1
    mixed = {**dict(to_hf(model.config, model.params)), name: other[name]}
    assert engine.checksum() == checksum(model.config, mixed)


def test_refused_weights_leave_the_old_ones_serving() -> None:
    engine, model = shared(), tiny_model(MODEL)
    before, expected = kept(engine), tokens(engine)
    bad = jax.tree.map(lambda leaf: leaf * np.nan, model.params)
    with pytest.raises(WeightUpdateError, match="not finite"):
        engine.update_weights(bad, check_finite=True)
    assert same(kept(engine), before)
    assert tokens(engine) == expected


def test_an_adapter_is_merged_into_what_is_stored_and_taken_out_without_a_trace() -> None:
    engine, model = shared(), tiny_model(MODEL)
    engine.update_weights(model.params)
    before, rng = kept(engine), np.random.default_rng(0)
    name = "model.layers.0.self_attn.q_proj.weight"
    hidden, queries = model.config.hidden_size, model.config.num_heads * model.config.head_dim
    a = rng.standard_normal((2, hidden)).astype(np.float32)
    b = rng.standard_normal((queries, 2)).astype(np.float32)
    engine.update_weights({name: Adapter(a, b, 0.1)})
    found = np.asarray(dict(to_hf(model.config, engine.params))[name])
    base = plain_quantized(np.asarray(dict(to_hf(model.config, model.params))[name]), "int8")
    wanted = plain_quantized((base + 0.1 * b @ a).astype(np.float32), "int8")
    assert np.abs(found - wanted).max() <= 1.01 * np.abs(wanted).max() / 127, (
        "at most a step of rounding apart"
    )
    assert np.mean(found != wanted.astype(np.float32)) < 0.05
    engine.update_weights({name: Adapter(a, b, 0.0)})
    assert same(kept(engine), before)


def test_weights_sleep_in_8_bits_and_may_be_pushed_meanwhile() -> None:
    engine, model = shared(), tiny_model(MODEL)
    engine.update_weights(model.params)
    expected, before = tokens(engine), kept(engine)
    report = engine.sleep(level=2)
    full = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    sums = 8 * sum(map(is_quantized, leaves_of(engine._core.executor.params)))
    assert report.weight_bytes == sum(leaf.nbytes for leaf in before) + sums < full
    engine.wake_up()
    assert tokens(engine) == expected
    engine.sleep(level=2, keep_weights=False)
    engine.update_weights(model.params)
    engine.wake_up()
    assert same(kept(engine), before)
    assert tokens(engine) == expected


def test_donated_weights_are_taken_from_their_sender_when_they_serve() -> None:
    engine, model = shared(), tiny_model(MODEL)
    engine.update_weights(model.params)
    before = kept(engine)
    sent = jax.tree.map(
        lambda leaf: jax.device_put(jnp.array(leaf, copy=True), jax.devices()[0]), model.params
    )
    with pytest.raises(WeightUpdateError):
        engine.update_weights(sent, donate=True, checksum="another")
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(sent))
    engine.update_weights(sent, donate=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(sent))
    assert same(kept(engine), before)


def test_a_second_update_compiles_nothing() -> None:
    engine, model = shared(), tiny_model(MODEL)
    other = random_params(model.config, 7)
    for weights in (model.params, other):
        engine.update_weights(weights)
        tokens(engine)
    with counting_compilations() as seen:
        for weights in (model.params, other):
            engine.update_weights(weights)
            tokens(engine)
    assert seen == []
