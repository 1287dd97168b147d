"""Latent attention, reference and TPU kernel (interpreted, with race detection), against float64 with a mask."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from rollout_spec.kernels import latent_pages_shape, mla_tree_attention

from rollout_spec.errors import KernelLimitError
from tests.kernels.interpreted import race_detection
from tests.kernels.paged_sequences import Part, random_parents

HEADS, LATENT, ROPE, PAGE_SIZE, SEQUENCES, TOKENS, PAGES = 3, 256, 64, 16, 3, 24, 6
SCALE = 0.05

attend = jax.jit(mla_tree_attention, static_argnames=("scale", "backend"))


@dataclass
class LatentWorld:
    """Sequences in pages of a latent cache that is NaN wherever nothing was written."""

    backend: str
    rng: np.random.Generator
    pages: jax.Array = field(init=False)
    table: NDArray[np.int32] = field(init=False)
    cached: list[NDArray[np.float64]] = field(init=False)

    def __post_init__(self) -> None:
        count = SEQUENCES * PAGES + 2
        self.pages = jnp.full(latent_pages_shape(count, PAGE_SIZE, LATENT, ROPE), np.nan, jnp.float32)
        self.table = (
            self.rng.permutation(count)[: SEQUENCES * PAGES].reshape(SEQUENCES, PAGES).astype(np.int32)
        )
        self.cached = [np.zeros((0, LATENT + ROPE)) for _ in range(SEQUENCES)]

    def step(self, parts: list[Part]) -> None:
        """Attends in one call, checks the output, and caches causal tokens and roots."""
        used = sum(part.count for part in parts)
        draw = self.rng.normal
        q, rows = draw(size=(TOKENS, HEADS, LATENT + ROPE)), draw(size=(TOKENS, LATENT + ROPE))
        q, rows = (np.asarray(array, np.float32).astype(np.float64) for array in (q, rows))
        ancestors = self.rng.integers(0, 2**32, (TOKENS, 2), dtype=np.uint32)
        kv_lens, table = np.full(SEQUENCES, 7, np.int32), np.zeros_like(self.table)
        starts = np.full(SEQUENCES + 1, used, np.int32)
        expected, start = np.zeros((used, HEADS, LATENT)), 0
        for index, part in enumerate(parts):
            here = slice(start, start + part.count)
            cached = len(self.cached[part.sequence])
            ancestors[here], starts[index] = part.words(), start
            kv_lens[index], table[index] = cached + part.count, self.table[part.sequence]
            keys = np.concatenate([self.cached[part.sequence], rows[here]])
            mask = np.concatenate([np.ones((part.count, cached), np.bool_), part.sees()], axis=1)
            scores = np.einsum("thd,kd->thk", q[here], keys) * SCALE
            weights = np.where(mask[:, None], np.exp(scores - scores.max(axis=2, keepdims=True)), 0.0)
            expected[here] = np.einsum(
                "thk,kd->thd", weights / weights.sum(axis=2, keepdims=True), keys[:, :LATENT]
            )
            kept = part.count if part.parents is None else 1
            self.cached[part.sequence] = np.concatenate([self.cached[part.sequence], rows[here][:kept]])
            start += part.count
        q[used:], rows[used:] = np.nan, np.nan
        inputs = (q[..., :LATENT], q[..., LATENT:], rows[:, :LATENT], rows[:, LATENT:])
        out, self.pages = attend(
            *(jnp.asarray(array, jnp.float32) for array in inputs),
            self.pages,
            kv_lens,
            table,
            starts,
            ancestors,
            np.array([len(parts)], np.int32),
            scale=SCALE,
            backend=self.backend,
        )
        np.testing.assert_allclose(out[:used], expected, atol=2e-5, rtol=2e-5)


def random_parts(world: LatentWorld) -> list[Part]:
    rng, left, parts = world.rng, TOKENS, []
    for sequence in rng.permutation(SEQUENCES)[: rng.integers(1, SEQUENCES + 1)]:
        room = min(left, PAGES * PAGE_SIZE - len(world.cached[sequence]))
        if room < 1:
            continue
        count = int(rng.integers(1, room + 1))
        parents = random_parents(rng, count - 1) if rng.random() < 0.5 else None
        parts.append(Part(int(sequence), count, parents))
        left -= count
    return parts


@pytest.mark.parametrize("seed", range(3))
def test_the_reference_equals_attention_with_a_mask(seed: int) -> None:
    world = LatentWorld("reference", np.random.default_rng(seed))
    for _ in range(5):
        world.step(random_parts(world))


def test_the_kernel_equals_attention_with_a_mask_without_races() -> None:
    with race_detection() as check_races:
        for seed in range(3):
            world = LatentWorld("pallas", np.random.default_rng(seed))
            for _ in range(4):
                world.step(random_parts(world))
                check_races()


def test_sizes_that_do_not_fit_are_refused() -> None:
    def call(latent: int, pages: tuple[int, ...]) -> None:
        jax.eval_shape(
            lambda *arrays: mla_tree_attention(*arrays, scale=1.0, backend="pallas"),
            jnp.zeros((2, 4, latent)),
            jnp.zeros((2, 4, 64)),
            jnp.zeros((2, latent)),
            jnp.zeros((2, 64)),
            jnp.zeros(pages),
            jnp.array([2]),
            jnp.array([[0]]),
            jnp.array([0, 2]),
            jnp.full((2, 2), 0xFFFFFFFF, jnp.uint32),
            jnp.array([1]),
        )

    with pytest.raises(ValueError, match="rows of 640 numbers for 512"):
        call(512, (1, 2, 1, 16, 576))
    with pytest.raises(KernelLimitError, match="multiple of 128; got 96"):
        call(96, latent_pages_shape(2, 16, 96, 64))
