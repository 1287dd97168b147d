"""Sequences that live in pages, and what attention over them must be: dense, in float64, one query at a time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from rollout_spec.kernels import kv_pages_shape, move_cached_tokens, tree_paged_attention

from rollout_spec.tree import ancestor_words

Array = NDArray[Any]
CAUSAL = np.uint32(0xFFFFFFFF)

_attention = jax.jit(
    tree_paged_attention,
    static_argnames=("scale", "sliding_window", "soft_cap", "k_scale", "v_scale", "backend"),
)
_move = jax.jit(move_cached_tokens)


@dataclass(frozen=True)
class Sizes:
    """What one compilation of the kernel depends on."""

    page_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    tokens: int = 48
    sequences: int = 4
    longest: int = 96
    """Tokens that the page table of a sequence has room for."""
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    scale: float = 0.4
    backend: str = "auto"
    cache_dtype: str = ""
    """Of the pages, where it isn't `dtype`."""
    k_scale: float | None = None
    v_scale: float | None = None

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.longest // self.page_size)

    @property
    def num_pages(self) -> int:
        """Some more than all sequences can hold."""
        return self.sequences * self.pages_per_sequence + 3


@dataclass(frozen=True)
class Part:
    """A sequence's part of a step: `count` tokens, causal without parents, else a root and its tree."""

    sequence: int
    count: int
    parents: tuple[int, ...] | None = None

    def words(self) -> Array:
        if self.parents is None:
            return np.full((self.count, 2), CAUSAL)
        return ancestor_words(self.parents)

    def sees(self) -> Array:
        """bool[count, count]: which of the step's tokens each of them sees, by walking up the tree."""
        if self.parents is None:
            return np.tril(np.ones((self.count, self.count), np.bool_))
        seen = np.zeros((self.count, self.count), np.bool_)
        for token in range(self.count):
            walk = token
            while walk >= 0:
                seen[token, walk] = True
                walk = self.parents[walk - 1] + 1 if walk > 0 else -1
        return seen

    def depths(self) -> Array:
        """int[count]: place in the text behind the cached tokens."""
        return self.sees().sum(axis=1) - 1


@dataclass
class PlainCache:
    """Keys and values of one sequence, float64[N, Hk, D], in the order of the text."""

    keys: Array
    values: Array


@dataclass
class PagedSequences:
    """Drives the kernel through steps, and checks each against plain attention."""

    sizes: Sizes
    rng: np.random.Generator
    fill: float = 77.0
    """What the pages hold at first."""
    magnitude: float = 1.0
    """Of queries and keys."""
    kv_pages: jax.Array = field(init=False)
    pages: list[Array] = field(init=False)
    caches: list[PlainCache] = field(init=False)
    sinks: Array | None = field(init=False)
    computed: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    """Keys and values of each sequence's tokens in the last step it took part in."""

    def __post_init__(self) -> None:
        s = self.sizes
        cache_dtype = s.cache_dtype or s.dtype
        shape = kv_pages_shape(s.num_pages, s.page_size, s.num_kv_heads, s.head_dim, cache_dtype)
        self.kv_pages = jnp.full(shape, self.fill, cache_dtype)
        permuted = self.rng.permutation(s.num_pages)[: s.sequences * s.pages_per_sequence]
        self.pages = list(permuted.reshape(s.sequences, -1))
        empty = np.zeros((0, s.num_kv_heads, s.head_dim))
        self.caches = [PlainCache(empty, empty) for _ in range(s.sequences)]
        self.sinks = self.rng.normal(0, 2, s.num_heads) if s.sinks else None

    def length(self, sequence: int) -> int:
        return len(self.caches[sequence].keys)

    def _rounded(self, array: Array) -> Array:
        return np.asarray(jnp.asarray(array, self.sizes.dtype), np.float64)

    def _stored(self, array: Array, scale: float | None) -> Array:
        """`array` as the numbers that the pages hold, in float64."""
        if not self.sizes.cache_dtype:
            return array
        stored = array / scale if scale is not None else array
        if self.sizes.cache_dtype == "int8":
            return np.clip(np.round(stored.astype(np.float32)), -127, 127).astype(np.float64)
        return np.asarray(jnp.asarray(stored, jnp.float32).astype(self.sizes.cache_dtype), np.float64)

    def step(self, parts: Sequence[Part]) -> None:
        """Runs the parts in one call, checks outputs and writes, and caches causal tokens and roots."""
        s = self.sizes
        used = sum(part.count for part in parts)
        assert used <= s.tokens, "the test asked for more than fits"
        shape = (s.tokens, s.num_kv_heads, s.head_dim)
        q = self._rounded(self.rng.normal(0, self.magnitude, (s.tokens, s.num_heads, s.head_dim)))
        k, v = (
            self._rounded(self.rng.normal(0, self.magnitude, shape)),
            self._rounded(self.rng.normal(0, 1, shape)),
        )
        used_q, used_k, used_v = (array.copy() for array in (q, k, v))
        for array in (used_q, used_k, used_v):
            array[used:] = self.fill
        stored_k, stored_v = self._stored(k, s.k_scale), self._stored(v, s.v_scale)
        k, v = stored_k * (s.k_scale or 1.0), stored_v * (s.v_scale or 1.0)
        # What lies behind the parts in use is arbitrary.
        ancestors = self.rng.integers(0, 2**32, (s.tokens, 2), dtype=np.uint32)
        kv_lens = self.rng.integers(0, 100, s.sequences).astype(np.int32)
        page_table = self.rng.integers(0, s.num_pages, (s.sequences, s.pages_per_sequence)).astype(np.int32)
        cu_q_lens = np.full(s.sequences + 1, used, np.int32)
        start, expected = 0, np.zeros((used, s.num_heads, s.head_dim))
        for row, part in enumerate(parts):
            here = slice(start, start + part.count)
            ancestors[here] = part.words()
            kv_lens[row] = self.length(part.sequence) + part.count
            page_table[row] = self.pages[part.sequence]
            cu_q_lens[row] = start
            expected[here] = self._plain(part, q[here], k[here], v[here])
            self._remember(part, k[here], v[here])
            start += part.count
        before = np.asarray(self.kv_pages, np.float64)
        out, self.kv_pages = _attention(
            *(jnp.asarray(array, s.dtype) for array in (used_q, used_k, used_v)),
            self.kv_pages,
            kv_lens,
            page_table,
            cu_q_lens,
            ancestors,
            np.array([len(parts)], np.int32),
            scale=s.scale,
            sliding_window=s.sliding_window,
            soft_cap=s.soft_cap,
            sinks=None if self.sinks is None else jnp.asarray(self.sinks, jnp.float32),
            k_scale=s.k_scale,
            v_scale=s.v_scale,
            backend=s.backend,
        )
        assert out.dtype == jnp.dtype(s.dtype)
        tolerance = 1e-2 if s.dtype == "bfloat16" else 2e-6 if s.backend != "pallas" else 2e-5
        np.testing.assert_allclose(
            np.asarray(out[:used], np.float64), expected, atol=tolerance, rtol=tolerance
        )
        # Whatever the layout: as many numbers changed as the tokens in use have, so padding wrote nothing.
        after = np.asarray(self.kv_pages, np.float64)
        differ = (before != after) & ~(np.isnan(before) & np.isnan(after))
        assert differ.sum() <= used * 2 * s.num_kv_heads * s.head_dim
        assert np.isin(after[differ], np.concatenate([stored_k[:used], stored_v[:used]])).all()

    def _plain(self, part: Part, q: Array, k: Array, v: Array) -> Array:
        """float64[count, Hq, D]."""
        s, cache = self.sizes, self.caches[part.sequence]
        cached = len(cache.keys)
        keys, values = np.concatenate([cache.keys, k]), np.concatenate([cache.values, v])
        positions = np.concatenate([np.arange(cached), cached + part.depths()])
        seen = np.concatenate([np.ones((part.count, cached), np.bool_), part.sees()], axis=1)
        out = np.zeros_like(q)
        for token in range(part.count):
            visible = seen[token]
            if s.sliding_window is not None:
                visible = visible & (positions > positions[cached + token] - s.sliding_window)
            for head in range(s.num_heads):
                kv_head = head // (s.num_heads // s.num_kv_heads)
                scores = keys[visible, kv_head] @ q[token, head] * s.scale
                if s.soft_cap is not None:
                    scores = s.soft_cap * np.tanh(scores / s.soft_cap)
                sink = [] if self.sinks is None else [self.sinks[head]]
                weights = np.exp(scores - max([*scores, *sink]))
                total = weights.sum() + sum(np.exp(sink - max([*scores, *sink])))
                out[token, head] = weights @ values[visible, kv_head] / total
        return out

    def _remember(self, part: Part, k: Array, v: Array) -> None:
        kept = part.count if part.parents is None else 1
        cache = self.caches[part.sequence]
        cache.keys, cache.values = (
            np.concatenate([cache.keys, k[:kept]]),
            np.concatenate([cache.values, v[:kept]]),
        )
        self.computed[part.sequence] = k, v

    def accept(self, part: Part, nodes: Sequence[int]) -> None:
        """Makes a path of the tree that `part` just computed a part of the text: moves its keys and values."""
        k, v = self.computed[part.sequence]
        first = self.length(part.sequence)
        sources = np.zeros(8, np.int32)
        destinations = np.full(8, -1, np.int32)
        sources[: len(nodes)] = first + np.array(nodes)
        destinations[: len(nodes)] = first + np.arange(len(nodes))
        table = np.tile(self.pages[part.sequence], (8, 1)).astype(np.int32)
        self.kv_pages = _move(self.kv_pages, sources, destinations, table)
        cache, rows = self.caches[part.sequence], np.array(nodes, int) + 1
        cache.keys, cache.values = (
            np.concatenate([cache.keys, k[rows]]),
            np.concatenate([cache.values, v[rows]]),
        )


def random_parents(rng: np.random.Generator, nodes: int) -> tuple[int, ...]:
    """Any tree: bushy ones, stars and long paths."""
    reach = int(rng.choice([1, 2, 64]))
    return tuple(int(rng.integers(max(-1, node - reach), node)) for node in range(nodes))


def random_path(rng: np.random.Generator, parents: Sequence[int], most: int) -> list[int]:
    """A path from the root down, maybe empty."""
    path: list[int] = []
    while len(path) < most:
        last = path[-1] if path else -1
        children = [node for node, parent in enumerate(parents) if parent == last]
        if not children or rng.random() < 0.2:
            break
        path.append(int(rng.choice(children)))
    return path


@functools.cache
def full_tree(kind: str) -> tuple[int, ...]:
    """63 nodes as one path or all below the root."""
    return tuple(range(-1, 62)) if kind == "path" else (-1,) * 63
