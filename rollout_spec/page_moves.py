"""Whole pages between the device and host memory, over all caches at once, so many at a time that it compiles once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from .host_cache import PageContent
from .step import StepState

AT_ONCE = 8  # pages

Caches = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]
"""`StepState.kv_pages` and `StepState.head_states`."""


def read(state: StepState, pages: list[int]) -> list[PageContent]:
    """Copies of what pages hold; waits for the device."""
    contents: list[PageContent] = []
    for numbers, count in _groups(pages):
        found = jax.device_get(_read(state.kv_pages, state.head_states, numbers))
        for at in range(count):
            contents.append(
                tuple(np.take(part, at, axis=axis) for part, axis in zip(found, (2, 1), strict=False))
            )
    return contents


def write(state: StepState, pages: list[int], contents: list[PageContent], sharding: Any) -> StepState:
    """The state with these pages set; the old one is donated. sharding: of the state."""
    out = sharding
    if isinstance(sharding, StepState):
        out = sharding.kv_pages, sharding.head_states
    done = 0
    for numbers, count in _groups(pages):
        group = contents[done : done + count]
        group += [group[-1]] * (AT_ONCE - count)
        parts = tuple(
            np.stack(part, axis=axis) for part, axis in zip(zip(*group, strict=True), (2, 1), strict=False)
        )
        # A page named twice is written twice with the same.
        kv_pages, head_states = _writer(out)((state.kv_pages, state.head_states), numbers, parts)
        state = dataclasses.replace(state, kv_pages=kv_pages, head_states=head_states)
        done += count
    return state


def _groups(pages: list[int]) -> Iterator[tuple[NDArray[np.int32], int]]:
    """Groups of AT_ONCE pages, the last one filled up with its last, and how many each stands for."""
    for start in range(0, len(pages), AT_ONCE):
        group = pages[start : start + AT_ONCE]
        yield np.array(group + [group[-1]] * (AT_ONCE - len(group)), np.int32), len(group)


@jax.jit
def _read(
    kv_pages: tuple[jax.Array, ...], head_states: tuple[jax.Array, ...], pages: jax.Array
) -> tuple[jax.Array, ...]:
    """[caches, planes, AT_ONCE, heads, page_size, D], and [heads, AT_ONCE, page_size, E] where there are any."""
    found = (jnp.stack([cache[:, pages] for cache in kv_pages]),)
    return (*found, jnp.stack([states[pages] for states in head_states])) if head_states else found


@functools.lru_cache(maxsize=64)
def _writer(sharding: Any) -> Callable[[Caches, Any, tuple[Any, ...]], Caches]:
    def run(caches: Caches, pages: jax.Array, parts: tuple[jax.Array, ...]) -> Caches:
        kv_pages, head_states = caches
        return (
            tuple(cache.at[:, pages].set(part) for cache, part in zip(kv_pages, parts[0], strict=True)),
            tuple(
                states.at[pages].set(part)
                for states, part in zip(head_states, parts[1] if head_states else (), strict=True)
            ),
        )

    return jax.jit(run, donate_argnums=0, out_shardings=sharding)
