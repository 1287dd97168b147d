"""The sampling kernel in TPU interpret mode against the reference, over random rows, filters, tables and trees."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollout_spec.kernels.sampling import BLOCK_SIZE, SEEN_IN_PROMPT, STOP_TOKEN, SamplingTables, tree_sample
from rollout_spec.kernels.sampling.limits import check_limits, most_tokens
from rollout_spec.kernels.sampling.noise import BLOCK_LEVEL, TOKEN_LEVEL, gumbel
from rollout_spec.kernels.sampling.pallas import _as_float, _gumbel

from rollout_spec.errors import KernelLimitError
from tests.kernels.interpreted import race_detection
from tests.kernels.test_tree_sample import random_forest, rows_of, sampling_of, tables_of

ROWS = 11  # a tile and a part of one
VOCABULARY = 1100  # five blocks, the last part full; two chunks of 1,024, the last part full

sample = jax.jit(tree_sample, static_argnames=("block_size", "backend"))


def random_inputs(seed: int, *, tables: bool, filters: bool) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((ROWS, VOCABULARY)) * rng.choice([0.5, 3.0, 20.0])).astype(np.float32)
    logits[rng.integers(ROWS)] = np.round(logits[0])  # ties
    parents = random_forest(rng, ROWS)
    fields: dict[str, Any] = {"temperature": rng.choice([0.0, 1.0, 0.6, 1.4], ROWS)}
    if filters:
        fields |= {
            "top_k": rng.choice([0, 1, 5, 100, VOCABULARY + 3], ROWS),
            "top_p": rng.choice([1.0, 0.9, 0.3, 1e-6], ROWS),
            "min_p": rng.choice([0.0, 0.05, 1.0], ROWS),
        }
    held = tables_of(ROWS, VOCABULARY)
    if tables:
        fields |= {
            "uses_tables": rng.random(ROWS) < 0.7,
            "repetition_penalty": rng.choice([1.0, 1.3], ROWS),
            "frequency_penalty": rng.choice([0.0, 0.5], ROWS),
            "presence_penalty": rng.choice([0.0, 0.5], ROWS),
            "stop_from_position": rng.choice([0, 50], ROWS),
        }
        held = SamplingTables(
            output_counts=rng.integers(0, 3, (ROWS, VOCABULARY)).astype(np.int32),
            flags=rng.choice([0, SEEN_IN_PROMPT, STOP_TOKEN], (ROWS, VOCABULARY)).astype(np.uint8),
            bias=np.where(rng.random((ROWS, VOCABULARY)) < 0.5, -np.inf, 0.0).astype(np.float32),
        )
    greedy = np.argmax(logits, axis=1)
    token_ids = np.where(rng.random(ROWS) < 0.5, greedy[np.maximum(parents, 0)], 7)  # some are accepted
    rows = rows_of(
        ROWS,
        parents=parents,
        token_ids=token_ids,
        targets=rng.integers(0, VOCABULARY, ROWS),
        positions=rng.integers(0, 99, ROWS),
    )
    return jnp.asarray(logits), rows, sampling_of(ROWS, **fields), held


def assert_equal(one: Any, other: Any) -> None:
    for field in dataclasses.fields(one):
        mine, its = np.asarray(getattr(one, field.name)), np.asarray(getattr(other, field.name))
        if mine.dtype == np.float32:
            np.testing.assert_allclose(mine, its, atol=3e-5, rtol=1e-5, err_msg=field.name)
        else:
            np.testing.assert_array_equal(mine, its, err_msg=field.name)


@given(seed=st.integers(0, 2**32 - 1), tables=st.booleans(), filters=st.booleans())
@example(seed=0, tables=False, filters=False)
@example(seed=1, tables=True, filters=True)
@settings(max_examples=30, deadline=None)
def test_tokens_and_numbers_are_the_references(seed: int, tables: bool, filters: bool) -> None:
    inputs = random_inputs(seed, tables=tables, filters=filters)
    assert_equal(sample(*inputs, backend="pallas"), sample(*inputs, backend="reference"))


def test_vocabularies_of_several_registers_of_blocks() -> None:
    vocabulary = 2 * 128 * BLOCK_SIZE + 700
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.standard_normal((8, vocabulary)).astype(np.float32))
    rows = rows_of(8, positions=rng.integers(0, 99, 8), targets=rng.integers(0, vocabulary, 8))
    temperature = np.array([0, 1, 1, 1, 1, 1, 0.7, 3])
    inputs = (logits, rows, sampling_of(8, temperature=temperature), tables_of(8, 1))
    found = sample(*inputs, backend="pallas")
    assert_equal(found, sample(*inputs, backend="reference"))
    assert len(np.unique(np.asarray(found.tokens) // (128 * BLOCK_SIZE))) > 1


def test_nothing_races_and_nothing_unwritten_is_read() -> None:
    inputs = random_inputs(9, tables=False, filters=True)
    expected = sample(*inputs, backend="reference")
    with race_detection() as check:
        found = jax.jit(functools.partial(tree_sample, backend="pallas"))(*inputs)
        jax.block_until_ready(found)
        check()
    assert_equal(found, expected)


def test_the_noise_has_the_references_bits() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**32, (8, 2), dtype=np.uint64).astype(np.uint32)
    positions = rng.integers(0, 2**20, 8).astype(np.int32)
    index = rng.integers(0, 2**18, (8, 128)).astype(np.int32)
    words = jax.lax.bitcast_convert_type(jnp.asarray(seeds), jnp.int32)
    for level in (BLOCK_LEVEL, TOKEN_LEVEL):
        mine = _gumbel(
            (words[:, :1], words[:, 1:]), jnp.asarray(positions)[:, None], level, jnp.asarray(index)
        )
        its = gumbel(jnp.asarray(seeds), jnp.asarray(positions), level, jnp.asarray(index))
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(its))
    bits = np.concatenate([rng.integers(0, 2**32, 1000), [0, 2**32 - 1, 2**24 + 1, 2**31 + 128, 2**31 + 384]])
    bits = bits.astype(np.uint32)
    np.testing.assert_array_equal(np.asarray(_as_float(jnp.asarray(bits))), bits.astype(np.float32))


def test_what_the_kernel_does_not_support_is_refused_before_compiling() -> None:
    with pytest.raises(KernelLimitError, match="blocks of 256 tokens; got block_size=128"):
        check_limits(VOCABULARY, 128)
    with pytest.raises(KernelLimitError, match="use backend='reference'"):
        check_limits(most_tokens() + 1, BLOCK_SIZE)
    check_limits(262_208, BLOCK_SIZE)
    check_limits(100, 100)


def test_on_a_mesh_every_device_samples_its_share() -> None:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.mesh_sampling"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:2] == ["32 equal", "5 equal"]
