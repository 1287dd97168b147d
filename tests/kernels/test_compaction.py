"""Moving cached tokens gives the pages that writing the moved tokens there would have given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from rollout_spec.kernels import kv_pages_shape, move_cached_tokens, tree_paged_attention

from rollout_spec.errors import KernelLimitError
from tests.kernels.interpreted import race_detection

ENTRIES, SEQUENCES, LENGTH, HEADS, HEAD_DIM = 24, 3, 20, 2, 4
PAGE_SIZES = [1, 3, 16, 64]

move = jax.jit(move_cached_tokens, static_argnames="backend")
attend = jax.jit(tree_paged_attention, static_argnames="scale")


def page_table(rng: np.random.Generator, page_size: int) -> tuple[NDArray[np.int32], int]:
    """int32[SEQUENCES, P] of shuffled pages, and how many pages there are."""
    per_sequence = -(-LENGTH // page_size)
    num_pages = SEQUENCES * per_sequence + 2
    pages = rng.permutation(num_pages)[: SEQUENCES * per_sequence]
    return pages.reshape(SEQUENCES, per_sequence).astype(np.int32), num_pages


def written(numbers: NDArray, table: NDArray[np.int32], num_pages: int, page_size: int) -> jax.Array:
    """Pages with tokens of the numbers [SEQUENCES, LENGTH]; key and value, head and dimension all differ."""
    tokens = SEQUENCES * LENGTH
    part = jnp.arange(HEADS * HEAD_DIM).reshape(HEADS, HEAD_DIM) / 16
    keys = jnp.asarray(numbers, jnp.float32).reshape(-1, 1, 1) + part
    _, pages = attend(
        keys,
        keys,
        -keys,
        jnp.full(kv_pages_shape(num_pages, page_size, HEADS, HEAD_DIM, jnp.float32), 1e4),
        np.full(SEQUENCES, LENGTH, np.int32),
        table,
        np.arange(0, tokens + 1, LENGTH, dtype=np.int32),
        np.full((tokens, 2), 0xFFFFFFFF, np.uint32),
        np.array([SEQUENCES], np.int32),
        scale=1.0,
    )
    return pages


def check_moves(
    rng: np.random.Generator, page_size: int, moves: list[tuple[int, int, int]], backend: str = "reference"
) -> NDArray[np.int64]:
    """Moves (sequence, source, destination), padded with entries that do nothing; returns what lies where."""
    table, num_pages = page_table(rng, page_size)
    numbers = rng.permutation(SEQUENCES * LENGTH).reshape(SEQUENCES, LENGTH)
    after = numbers.copy()
    for sequence, source, destination in moves:
        if destination >= 0:
            after[sequence, destination] = numbers[sequence, source]
    padding = [(int(rng.integers(SEQUENCES)), int(rng.integers(LENGTH)), -1)] * (ENTRIES - len(moves))
    owners, sources, destinations = np.array([*moves, *padding], np.int32).T
    moved = move(
        written(numbers, table, num_pages, page_size),
        sources,
        destinations,
        np.ascontiguousarray(table[owners]),
        backend=backend,
    )
    np.testing.assert_array_equal(moved, written(after, table, num_pages, page_size))
    return after - numbers


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_moves_of_several_sequences(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    for _ in range(5):
        places = rng.permutation(SEQUENCES * LENGTH)[:ENTRIES]  # no destination twice
        moves = [
            (
                int(place) // LENGTH,
                int(rng.integers(LENGTH)),
                int(place) % LENGTH if rng.random() < 0.7 else -1,
            )
            for place in places
        ]
        assert check_moves(rng, page_size, moves).any()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_accepted_path_whose_sources_are_destinations_of_others(page_size: int) -> None:
    """Nodes 2, 3, 5, 9 behind a root at 7 go to 8, 9, 10, 11: 9 and 10 are written and read in one call."""
    rng = np.random.default_rng(0)
    path = [(1, 8 + node, 8 + place) for place, node in enumerate([1, 2, 4, 8])]
    other = [(0, 3 + node, 3 + place) for place, node in enumerate(range(5, 15))]
    assert check_moves(rng, page_size, [*path, *other]).any()


def test_a_swap_reads_both_before_it_writes() -> None:
    assert check_moves(np.random.default_rng(1), 3, [(2, 4, 11), (2, 11, 4)]).any()


def test_entries_without_effect() -> None:
    in_place = [(sequence, position, position) for sequence in range(SEQUENCES) for position in range(5)]
    unused = [(0, 3, -1), (1, 0, -7)]
    assert not check_moves(np.random.default_rng(2), 16, [*in_place, *unused]).any()


def test_the_tpu_kernel_moves_the_same_without_races() -> None:
    with race_detection() as check_races:
        for seed in range(3):
            rng = np.random.default_rng(seed)
            places = rng.permutation(SEQUENCES * LENGTH)[:ENTRIES]
            moves = [
                (int(place) // LENGTH, int(rng.integers(LENGTH)), int(place) % LENGTH if place % 3 else -1)
                for place in places
            ]
            assert check_moves(rng, 16, [*moves], backend="pallas").any()
            check_races()
        path = [(1, 8 + node, 8 + place) for place, node in enumerate([1, 2, 4, 8])]
        assert check_moves(np.random.default_rng(3), 16, path, backend="pallas").any()
        check_races()


def test_what_the_tpu_kernel_does_not_support_is_refused_before_compiling() -> None:
    def call(page_size: int, entries: int) -> None:
        pages = jnp.zeros(kv_pages_shape(2, page_size, HEADS, 128, jnp.float32))
        zeros = jnp.zeros(entries, jnp.int32)
        jax.eval_shape(
            lambda *arrays: move_cached_tokens(*arrays, backend="pallas"), pages, zeros, zeros, zeros[:, None]
        )

    with pytest.raises(KernelLimitError, match="multiple of 16; got 3"):
        call(3, 1)
    with pytest.raises(KernelLimitError, match="got 8192 entries of 2,048 bytes"):
        call(16, 8192)
