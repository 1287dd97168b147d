"""The sampler on TPU: eight rows of logits are read into vector memory once, and all is computed there, in place.

Sums, the thresholds of top-k and top-p (bisection over the bits of the numbers, as in `filters.py`), the two levels of
the sampler and its noise are passes over vector memory; what leaves the kernel is a handful of numbers a row. Blocks of
256 tokens are two registers each; the sums of 128 blocks lie side by side in one register, so that noise is computed
for all of them at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .limits import BLOCK, CHUNK, TILE_ROWS, tile_bytes
from .noise import BLOCK_LEVEL, TOKEN_LEVEL, threefry2x32

_LANES = 128
_GROUP = BLOCK * _LANES
"""Tokens whose blocks' sums share a register."""


class SampledRows(NamedTuple):
    """What the kernel finds, [R] each: the token, and log-sum-exps of the given logits, of those divided by the
    temperature, and of those that the filters kept."""

    tokens: jax.Array  # int32
    raw_lse: jax.Array  # float32, and the two below
    whole_lse: jax.Array
    final_lse: jax.Array


def sample_rows(
    logits: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    interpret: Any = False,
) -> SampledRows:
    """Samples from each row.

    Args:
        logits: float32[R, V], penalties and biases applied.
        seeds: uint32[R, 2]. positions, top_k: int32[R]. temperature (0 is greedy), top_p, min_p: float32[R].
    """
    rows, vocabulary = logits.shape
    lanes = -(-vocabulary // CHUNK) * CHUNK
    groups = -(-lanes // _GROUP)
    padded = rows + -rows % TILE_ROWS
    padding = ((0, padded - rows), (0, 0))
    floats = jnp.stack([temperature, top_p, min_p], axis=1)
    words = lax.bitcast_convert_type(seeds, jnp.int32)
    integers = jnp.stack([words[:, 0], words[:, 1], positions, top_k], axis=1)
    buffers = 2 if 2 * TILE_ROWS * 4 * lanes <= tile_bytes() else 1  # with one, reading waits for computing
    tokens, sums = pl.pallas_call(
        functools.partial(_kernel, vocabulary),
        name="tree_sample",
        grid=(padded // TILE_ROWS,),
        in_specs=[
            pl.BlockSpec((TILE_ROWS, floats.shape[1]), lambda tile: (tile, 0)),
            pl.BlockSpec((TILE_ROWS, integers.shape[1]), lambda tile: (tile, 0)),
            pl.BlockSpec((TILE_ROWS, lanes), lambda tile: (tile, 0), pipeline_mode=pl.Buffered(buffers)),
        ],
        out_specs=[
            pl.BlockSpec((TILE_ROWS, 1), lambda tile: (tile, 0)),
            pl.BlockSpec((TILE_ROWS, 3), lambda tile: (tile, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((padded, 1), jnp.int32),
            jax.ShapeDtypeStruct((padded, 3), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((groups, TILE_ROWS, _LANES), jnp.float32)],  # log-sum-exps of blocks
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=tile_bytes() + (1 << 20)),
        interpret=interpret,
    )(jnp.pad(floats, padding, constant_values=1.0), jnp.pad(integers, padding), logits)
    return SampledRows(tokens[:rows, 0], sums[:rows, 0], sums[:rows, 1], sums[:rows, 2])


def _kernel(
    vocabulary: int, floats: Any, integers: Any, logits: Any, tokens: Any, sums: Any, lses: Any
) -> None:
    """`logits` holds whole chunks, and is this step's own: it is changed in place to what is sampled from."""
    temperature, top_p, min_p = (floats[:, index : index + 1] for index in range(3))
    low, high, position, top_k = (integers[:, index : index + 1] for index in range(4))
    seeds = (low, high)
    greedy = temperature == 0.0
    filtering = ~greedy & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    divisor = jnp.where(greedy, 1.0, temperature)

    _end(vocabulary, logits)
    raw_largest = _row_max(logits)
    raw_lse = raw_largest + jnp.log(_row_sum(logits, lambda x: jnp.exp(x - raw_largest)))
    sums[:, 0:1] = raw_lse
    sums[:, 1:2] = raw_lse

    @pl.when(jnp.max(jnp.where(divisor == 1.0, 0.0, 1.0)) > 0.0)
    def _() -> None:
        _each(logits, lambda x: x / divisor)
        largest = _row_max(logits)
        sums[:, 1:2] = largest + jnp.log(_row_sum(logits, lambda x: jnp.exp(x - largest)))

    @pl.when(jnp.max(jnp.where(filtering, 1.0, 0.0)) > 0.0)
    def _() -> None:
        _filter(vocabulary, logits, filtering, top_k, top_p, min_p)

    lane = lax.broadcasted_iota(jnp.int32, (TILE_ROWS, _LANES), 1)

    def summed(group: Any, best: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        block_max, block_lse = _block_sums(logits, group, lane)
        lses[group] = block_lse
        index = group * _LANES + lane
        score = jnp.where(greedy, block_max, block_lse + _gumbel(seeds, position, BLOCK_LEVEL, index))
        largest, where, largest_lse = best
        better = score > largest
        return (
            jnp.where(better, score, largest),
            jnp.where(better, index, where),
            jnp.maximum(largest_lse, block_lse),
        )

    lowest = jnp.full((TILE_ROWS, _LANES), -jnp.inf, jnp.float32)
    score, where, largest_lse = lax.fori_loop(
        0, lses.shape[0], summed, (lowest, jnp.zeros((TILE_ROWS, _LANES), jnp.int32), lowest)
    )
    winner = _first_largest(score, where)
    top = jnp.max(largest_lse, axis=1, keepdims=True)
    parts = lax.fori_loop(
        0,
        lses.shape[0],
        lambda group, total: total + jnp.exp(lses[group] - top),
        jnp.zeros((TILE_ROWS, _LANES), jnp.float32),
    )
    sums[:, 2:3] = top + jnp.log(jnp.sum(parts, axis=1, keepdims=True))
    tokens[:, 0:1] = _token_of(logits, winner, greedy, seeds, position)


# Passes over a tile of rows in vector memory


def _end(vocabulary: int, logits: Any) -> None:
    """Puts -inf behind the vocabulary's end, where nothing was read."""
    start = vocabulary // CHUNK * CHUNK
    if start < vocabulary:
        behind = lax.broadcasted_iota(jnp.int32, (TILE_ROWS, CHUNK), 1) >= vocabulary - start
        logits[:, start:] = jnp.where(behind, -jnp.inf, logits[:, start:])


def _chunk(number: Any, size: int = CHUNK) -> Any:
    return pl.ds(pl.multiple_of(number * size, size), size)


def _folded(logits: Any, begin: float, step: Callable[[Any, Any], Any]) -> Any:
    """float32[8, 1024]: the chunks of `logits` folded."""
    return lax.fori_loop(
        0,
        logits.shape[1] // CHUNK,
        lambda number, parts: step(parts, logits[:, _chunk(number)]),
        jnp.full((TILE_ROWS, CHUNK), begin, jnp.float32),
    )


def _row_max(logits: Any) -> Any:
    """float32[8, 1]"""
    return jnp.max(_folded(logits, -jnp.inf, jnp.maximum), axis=1, keepdims=True)


def _row_sum(logits: Any, term: Callable[[Any], Any]) -> Any:
    """float32[8, 1]"""
    return jnp.sum(_folded(logits, 0.0, lambda total, x: total + term(x)), axis=1, keepdims=True)


def _each(logits: Any, change: Callable[[Any], Any]) -> None:
    def one(number: Any, carry: None) -> None:
        logits[:, _chunk(number)] = change(logits[:, _chunk(number)])

    lax.fori_loop(0, logits.shape[1] // CHUNK, one, None)


# Filters


def _key(x: Any) -> Any:
    """int32 with the order of float32 `x`."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest_satisfying(holds: Callable[[Any], Any]) -> Any:
    """int32[8, 1]: by row, the largest threshold for which the monotone test `holds` is true."""
    lowest = jnp.full((TILE_ROWS, 1), -(2**31), jnp.int32)
    found = jnp.where(
        holds(jnp.zeros((TILE_ROWS, 1), jnp.int32)), jnp.zeros((TILE_ROWS, 1), jnp.int32), lowest
    )

    def try_bit(number: Any, found: Any) -> Any:
        candidate = found | lax.shift_left(jnp.int32(1), 30 - number)
        return jnp.where(holds(candidate), candidate, found)

    return lax.fori_loop(0, 31, try_bit, found)


def _filter(vocabulary: int, logits: Any, filtering: Any, top_k: Any, top_p: Any, min_p: Any) -> None:
    """Puts -inf in place of what top-k, then top-p, then min-p leave out, in rows that filter."""
    lowest = jnp.full((TILE_ROWS, 1), -(2**31), jnp.int32)
    limits = filtering & (top_k > 0) & (top_k < vocabulary)
    k = jnp.where(limits, top_k, vocabulary).astype(jnp.float32)

    def reaches_k(threshold: Any) -> Any:  # counts below 2**24 are exact in float32
        return _row_sum(logits, lambda x: jnp.where(_key(x) >= threshold, 1.0, 0.0)) >= k

    largest = _row_max(logits)
    by_k = lax.cond(
        jnp.max(jnp.where(limits, 1.0, 0.0)) > 0.0, lambda: _largest_satisfying(reaches_k), lambda: lowest
    )
    by_k = jnp.where(limits, by_k, lowest)

    def weight(x: Any) -> Any:
        return jnp.where(_key(x) >= by_k, jnp.exp(x - largest), 0.0)

    def by_mass() -> Any:
        target = top_p * _row_sum(logits, weight)

        def reaches_p(threshold: Any) -> Any:
            mass = _row_sum(logits, lambda x: jnp.where(_key(x) >= threshold, weight(x), 0.0))
            return (mass >= target) & (mass > 0.0)

        return _largest_satisfying(reaches_p)

    cuts = filtering & (top_p < 1.0)
    by_p = lax.cond(jnp.max(jnp.where(cuts, 1.0, 0.0)) > 0.0, by_mass, lambda: lowest)
    threshold = jnp.where(filtering, jnp.maximum(by_k, jnp.where(cuts, by_p, lowest)), lowest)
    least = jnp.where(filtering & (min_p > 0.0), largest + jnp.log(min_p), -jnp.inf)
    _each(logits, lambda x: jnp.where((_key(x) >= threshold) & (x >= least), x, -jnp.inf))


# The two levels of the sampler


def _block_sums(logits: Any, group: Any, lane: Any) -> tuple[Any, Any]:
    """Maximum and log-sum-exp of the 128 blocks of a group, a lane each."""

    def several(number: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
        largest, total = sums
        chunk = logits[:, _chunk(group * (_GROUP // CHUNK) + number)]
        for place in range(CHUNK // BLOCK):
            block = chunk[:, place * BLOCK : (place + 1) * BLOCK]
            top = jnp.max(block, axis=1, keepdims=True)
            part = jnp.sum(jnp.exp(block - _finite(top)), axis=1, keepdims=True)
            mine = lane == number * (CHUNK // BLOCK) + place
            largest = jnp.where(mine, top, largest)
            total = jnp.where(mine, part, total)
        return largest, total

    chunks = jnp.minimum(logits.shape[1] // CHUNK - group * (_GROUP // CHUNK), _GROUP // CHUNK)
    begin = (
        jnp.full((TILE_ROWS, _LANES), -jnp.inf, jnp.float32),
        jnp.zeros((TILE_ROWS, _LANES), jnp.float32),
    )
    largest, total = lax.fori_loop(0, chunks, several, begin)
    return largest, _finite(largest) + jnp.log(total)


def _finite(largest: Any) -> Any:
    """0 for -inf, as -inf - -inf is NaN."""
    return jnp.where(largest == -jnp.inf, 0.0, largest)


def _token_of(logits: Any, winner: Any, greedy: Any, seeds: Any, position: Any) -> Any:
    """int32[8, 1]: the token of the winning block, int32[8, 1], that has the largest logit and noise."""

    def look(number: Any, inside: Any) -> Any:
        chunk = logits[:, _chunk(number)]
        for place in range(CHUNK // BLOCK):
            mine = winner == number * (CHUNK // BLOCK) + place
            inside = jnp.where(mine, chunk[:, place * BLOCK : (place + 1) * BLOCK], inside)
        return inside

    inside = lax.fori_loop(
        0, logits.shape[1] // CHUNK, look, jnp.full((TILE_ROWS, BLOCK), -jnp.inf, jnp.float32)
    )
    ids = winner * BLOCK + lax.broadcasted_iota(jnp.int32, (TILE_ROWS, BLOCK), 1)
    scores = inside + jnp.where(greedy, 0.0, _gumbel(seeds, position, TOKEN_LEVEL, ids))
    return _first_largest(scores, ids)


def _first_largest(score: Any, index: Any) -> Any:
    """int32[8, 1]: the smallest index, below 2**24, of those with the largest score."""
    largest = jnp.max(score, axis=1, keepdims=True)
    candidates = jnp.where(score == largest, index.astype(jnp.float32), jnp.float32(2.0**24))
    return jnp.min(candidates, axis=1, keepdims=True).astype(jnp.int32)


def _gumbel(seeds: Any, position: Any, level: int, index: Any) -> Any:
    """`noise.gumbel` for int32 registers: the same bits, and the same float32 of them."""
    unsigned = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint32)
    shape = index.shape
    key = tuple(jnp.broadcast_to(unsigned(word), shape) for word in seeds)
    counter = (
        jnp.broadcast_to(unsigned(position), shape),
        unsigned(index) | jnp.uint32(level << 31),
    )
    high, low = threefry2x32(key, counter)  # type: ignore[arg-type]
    uniform = _as_float(high) * jnp.float32(2.0**-32)
    uniform += (_as_float(low) + jnp.float32(0.5)) * jnp.float32(2.0**-64)
    uniform = jnp.minimum(uniform, jnp.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))


def _as_float(bits: Any) -> Any:
    """uint32 as float32, rounded once: both halves and their product are exact."""
    upper = lax.bitcast_convert_type(bits >> jnp.uint32(16), jnp.int32).astype(jnp.float32)
    lower = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF), jnp.int32).astype(jnp.float32)
    return upper * jnp.float32(65536.0) + lower
