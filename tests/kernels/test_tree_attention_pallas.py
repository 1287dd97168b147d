"""The TPU kernel of tree attention, interpreted on the CPU with race detection, against plain attention in float64.

Unused pages, the rest of pages and padding tokens are NaN (77 where the type has none).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_spec.kernels import kv_pages_shape, tree_paged_attention

from rollout_spec.errors import KernelLimitError, RolloutError
from tests.kernels.interpreted import race_detection
from tests.kernels.paged_sequences import PagedSequences, Part, Sizes, random_parents, random_path

pallas = functools.partial(Sizes, backend="pallas", scale=0.1)
SIZES = {
    "float32": pallas(head_dim=128, num_heads=6, num_kv_heads=2, sequences=4, tokens=40, longest=300, page_size=16),
    "window, soft cap and sinks": pallas(
        head_dim=64, num_kv_heads=1, sliding_window=9, soft_cap=3.0, sinks=True, sequences=3, tokens=72, longest=200
    ),
    "bfloat16, single tokens": pallas(
        head_dim=128, dtype="bfloat16", sequences=4, tokens=4, longest=150, page_size=64
    ),
    "int8": pallas(
        head_dim=256, num_heads=2, num_kv_heads=1, cache_dtype="int8", k_scale=0.03, v_scale=0.04, page_size=32,
        sequences=2, tokens=16, longest=130,
    ),
    "fp8": pallas(
        head_dim=128, num_heads=2, num_kv_heads=2, dtype="bfloat16", cache_dtype="float8_e4m3fn", k_scale=0.5,
        v_scale=0.25, page_size=128, sequences=2, tokens=24, longest=256, sliding_window=40,
    ),
}  # fmt: skip


@st.composite
def step_parts(draw: st.DrawFn, world: PagedSequences) -> list[Part]:
    """Some of the sequences in any order, each with a chunk, a single token or a tree."""
    sizes, parts = world.sizes, []
    left = sizes.tokens
    for sequence in draw(st.permutations(range(sizes.sequences)))[: draw(st.integers(0, sizes.sequences))]:
        room = min(left, sizes.longest - world.length(sequence))
        if room < 1:
            continue
        kind = draw(st.sampled_from(["chunk", "full", "tree", "one"]))
        count = {"one": 1, "full": room}.get(kind) or draw(st.integers(1, room))
        parents = random_parents(world.rng, min(count, 64) - 1) if kind == "tree" else None
        count = min(count, 64) if kind == "tree" else count
        parts.append(Part(sequence, count, parents))
        left -= count
    return parts


@pytest.mark.parametrize("name", SIZES)
def test_random_steps_equal_plain_attention_without_races(name: str) -> None:
    fill = 77.0 if SIZES[name].cache_dtype == "int8" else np.nan

    @settings(
        max_examples=8,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(st.data(), st.integers(0, 2**20))
    def steps(data: st.DataObject, seed: int) -> None:
        world = PagedSequences(SIZES[name], np.random.default_rng(seed), fill=fill)
        for _ in range(3):
            parts = data.draw(step_parts(world))
            world.step(parts)
            check_races()
            for part in parts:
                if part.parents and not SIZES[name].cache_dtype:
                    world.accept(part, random_path(world.rng, part.parents, most=8))

    with race_detection() as check_races:
        steps()


def call(
    *, head_dim: int = 128, page_size: int = 16, dtype: Any = jnp.float32, pages: int = 1, scale: float = 1.0
) -> Any:
    """Traces a call of these sizes."""
    q, kv = jnp.zeros((2, 4, head_dim), dtype), jnp.zeros((2, 2, head_dim), dtype)
    return jax.eval_shape(
        functools.partial(tree_paged_attention, scale=scale, backend="pallas"),
        q,
        kv,
        kv,
        jax.ShapeDtypeStruct(kv_pages_shape(2, page_size, 2, head_dim, dtype), dtype),
        jnp.array([2]),
        jnp.zeros((1, pages), jnp.int32),
        jnp.array([0, 2]),
        jnp.full((2, 2), 0xFFFFFFFF, jnp.uint32),
        jnp.array([1]),
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"head_dim": 80}, "head dimension must be one of 64, 128, 256; got 80"),
        ({"page_size": 8}, "page size must be one of 16, 32, 64, 128; got 8"),
        ({"dtype": jnp.float16}, "dtype must be one of bfloat16, float32; got float16"),
        ({"pages": 300_000}, "scalar memory; got 1 sequences of 300000 pages"),
        ({"scale": 0.0}, "scale must be positive"),
    ],
)
def test_what_the_kernel_does_not_support_is_refused_before_compiling(wrong: dict, message: str) -> None:
    with pytest.raises(KernelLimitError, match=message) as caught:
        call(**wrong)
    assert isinstance(caught.value, RolloutError)
    assert isinstance(caught.value, ValueError)
