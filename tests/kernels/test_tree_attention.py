"""Attention over pages and trees equals plain attention, step after step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_spec.kernels import kv_pages_shape, tree_paged_attention

from tests.kernels.paged_sequences import PagedSequences, Part, Sizes, full_tree, random_parents, random_path

SIZES = {
    "page of 1": Sizes(page_size=1, num_heads=2, num_kv_heads=2, head_dim=4),
    "page of 3": Sizes(page_size=3, num_heads=6, num_kv_heads=2, head_dim=4),
    "page of 16": Sizes(page_size=16, num_heads=4, num_kv_heads=1),
    "page of 128": Sizes(page_size=128, longest=150),
    "page of 200": Sizes(page_size=200, longest=210, num_heads=3, num_kv_heads=3),
    "one sequence": Sizes(sequences=1, tokens=64, page_size=16, longest=160),
    "window": Sizes(page_size=3, sliding_window=5),
    "window of itself": Sizes(sliding_window=1),
    "soft cap": Sizes(soft_cap=1.5),
    "sinks": Sizes(sinks=True, num_heads=6, num_kv_heads=3),
    "window, soft cap and sinks": Sizes(page_size=7, sliding_window=9, soft_cap=3.0, sinks=True),
    "bfloat16": Sizes(dtype="bfloat16", sinks=True),
}


def random_parts(world: PagedSequences) -> list[Part]:
    """Some of the sequences in any order, each with a chunk of its prompt, a single token or a tree."""
    rng, sizes = world.rng, world.sizes
    parts, left = [], sizes.tokens
    for sequence in rng.permutation(sizes.sequences)[: int(rng.integers(1, sizes.sequences + 1))]:
        room = min(left, sizes.longest - world.length(int(sequence)))
        if room < 1:
            continue
        kind = rng.choice(["chunk", "one", "tree"])
        count = 1 if kind == "one" else int(rng.integers(1, min(room, 64) + 1))
        parents = random_parents(rng, count - 1) if kind == "tree" else None
        parts.append(Part(int(sequence), count, parents))
        left -= count
    return parts


@pytest.mark.parametrize("name", SIZES)
def test_random_steps_equal_plain_attention(name: str) -> None:
    for seed in range(3):
        world = PagedSequences(SIZES[name], np.random.default_rng(seed))
        for _ in range(6):
            parts = random_parts(world)
            world.step(parts)
            for part in parts:
                if part.parents:
                    world.accept(part, random_path(world.rng, part.parents, most=8))


@pytest.mark.parametrize("kind", ["path", "star"])
def test_the_fullest_tree(kind: str) -> None:
    """63 nodes. The last node of a path has all 64 bits set, as a token of a prompt chunk has: both see all."""
    world = PagedSequences(SIZES["one sequence"], np.random.default_rng(0))
    world.step([Part(0, 37)])
    world.step([Part(0, 64, full_tree(kind))])
    world.accept(Part(0, 64, full_tree(kind)), [0, 1, 2] if kind == "path" else [62])
    world.step([Part(0, 1)])


def test_prompt_chunks_longer_than_the_ancestor_words_and_than_a_block_of_keys() -> None:
    sizes = Sizes(tokens=150, sequences=2, longest=420, page_size=16, num_heads=2, num_kv_heads=1, head_dim=4)
    world = PagedSequences(sizes, np.random.default_rng(3))
    world.step([Part(0, 150)])
    world.step([Part(1, 20), Part(0, 130)])
    world.step([Part(0, 100), Part(1, 30, random_parents(world.rng, 29))])
    world.step([Part(1, 65), Part(0, 40, random_parents(world.rng, 39))])


def test_a_window_shorter_than_the_path_hides_a_nodes_own_ancestors() -> None:
    world = PagedSequences(SIZES["window"], np.random.default_rng(4))
    world.step([Part(0, 9), Part(1, 2)])
    world.step([Part(0, 12, tuple(range(-1, 10))), Part(1, 20, (-1, -1, *range(17)))])


def test_two_sequences_share_the_pages_of_a_common_prefix() -> None:
    sizes = SIZES["page of 16"]
    world = PagedSequences(sizes, np.random.default_rng(5))
    world.step([Part(0, 40)])
    world.pages[1][:2] = world.pages[0][:2]
    world.caches[1].keys, world.caches[1].values = world.caches[0].keys[:32], world.caches[0].values[:32]
    for _ in range(2):
        world.step([Part(0, 3), Part(1, 5, (-1, 0, -1, 2))])


def test_nothing_in_use_writes_nothing() -> None:
    PagedSequences(SIZES["page of 16"], np.random.default_rng(0)).step([])


def test_numbers_beyond_a_sequence_never_reach_it_not_even_nan() -> None:
    """A page's rest holds whatever its last owner left, and nothing may come of it."""
    world = PagedSequences(SIZES["page of 16"], np.random.default_rng(6), fill=np.nan)
    world.step([Part(0, 5), Part(2, 18)])
    world.step([Part(2, 1), Part(0, 6, (-1, 0, 0, -1, 3)), Part(1, 3)])


def test_large_scores_do_not_overflow() -> None:
    """Scores of 1e5, whose exponentials float32 has no room for."""
    world = PagedSequences(SIZES["page of 3"], np.random.default_rng(7), magnitude=300.0)
    world.step([Part(0, 20), Part(1, 9, random_parents(world.rng, 8))])
    world.step([Part(1, 1), Part(0, 3, (-1, -1))])


def call(num_heads: int = 4, num_kv_heads: int = 2, backend: str = "auto") -> None:
    """Traces a call of these heads."""
    q, kv = jnp.zeros((2, num_heads, 8)), jnp.zeros((2, num_kv_heads, 8))
    jax.eval_shape(
        functools.partial(tree_paged_attention, scale=1.0, backend=backend),
        q,
        kv,
        kv,
        jnp.zeros(kv_pages_shape(2, 4, num_kv_heads, 8, jnp.float32)),
        jnp.array([2]),
        jnp.array([[0]]),
        jnp.array([0, 2]),
        jnp.full((2, 2), 0xFFFFFFFF, jnp.uint32),
        jnp.array([1]),
    )


def test_query_heads_that_are_no_multiple_of_the_kv_heads_are_refused() -> None:
    call()
    with pytest.raises(ValueError, match=r"multiple of the KV heads; got 5 and 2"):
        call(num_heads=5)


def test_unknown_backends_are_refused_with_the_known_ones() -> None:
    call(backend="reference")
    with pytest.raises(ValueError, match=r"'auto'.*'reference'.*got 'cuda'"):
        call(backend="cuda")
