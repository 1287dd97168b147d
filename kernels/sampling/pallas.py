"""The sampler on TPU: eight rows of logits are read into vector memory once, and everything is computed from there.

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
from rollout_spec.kernels.backend import device_kind

from rollout_spec.errors import KernelLimitError

from .noise import BLOCK_LEVEL, TOKEN_LEVEL, threefry2x32

BLOCK = 256
"""Tokens of a block of the sampler that the kernel supports."""
_ROWS, _LANES = 8, 128
_GROUP = BLOCK * _LANES
"""Tokens whose blocks' sums share a register."""
_EIGHT = 8 * _LANES
_VMEM_BYTES = 48 << 20
_VMEM_BYTES_V4 = 15 << 20
_FLOATS, _INTEGERS = 4, 4


class SampledRows(NamedTuple):
    """What the kernel finds, [R] each: the token, and log-sum-exps of the given logits, of those divided by the
    temperature, and of those that the filters kept."""

    tokens: jax.Array  # int32
    raw_lse: jax.Array  # float32, and the two below
    whole_lse: jax.Array
    final_lse: jax.Array


def check_limits(vocabulary: int, block_size: int) -> None:
    """Raises KernelLimitError where the kernel doesn't support the vocabulary or the sampler's block."""
    if min(block_size, vocabulary) != min(BLOCK, vocabulary):
        raise KernelLimitError(
            f"tree_sample's kernel has blocks of {BLOCK} tokens; got block_size={block_size}: "
            "use that, or backend='reference'"
        )
    most = most_tokens()
    if vocabulary > most:
        raise KernelLimitError(
            f"tree_sample's kernel holds eight rows of at most {most:,} logits in vector memory here; got "
            f"{vocabulary:,}: use backend='reference'"
        )


def most_tokens() -> int:
    """Of a vocabulary, so that three times eight rows fit vector memory: as sampled from, as read, and the next."""
    room = _VMEM_BYTES_V4 if device_kind().startswith("tpu v4") else _VMEM_BYTES
    return room // (3 * _ROWS * 4) // _EIGHT * _EIGHT


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
    lanes = -(-vocabulary // _EIGHT) * _EIGHT
    groups = -(-lanes // _GROUP)
    padding = ((0, -rows % _ROWS), (0, 0))
    floats = jnp.stack([temperature, top_p, min_p, jnp.zeros_like(min_p)], axis=1)
    words = lax.bitcast_convert_type(seeds, jnp.int32)
    integers = jnp.stack([words[:, 0], words[:, 1], positions, top_k], axis=1)
    padded = rows + -rows % _ROWS
    found = pl.pallas_call(
        functools.partial(_kernel, vocabulary),
        name="tree_sample",
        grid=(padded // _ROWS,),
        in_specs=[
            pl.BlockSpec((_ROWS, _FLOATS), lambda tile: (tile, 0)),
            pl.BlockSpec((_ROWS, _INTEGERS), lambda tile: (tile, 0)),
            pl.BlockSpec((_ROWS, vocabulary), lambda tile: (tile, 0)),
        ],
        out_specs=[
            pl.BlockSpec((_ROWS, 1), lambda tile: (tile, 0)),
            pl.BlockSpec((_ROWS, 3), lambda tile: (tile, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((padded, 1), jnp.int32),
            jax.ShapeDtypeStruct((padded, 3), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((_ROWS, lanes), jnp.float32),  # the logits as they are sampled from
            pltpu.VMEM((groups, _ROWS, _LANES), jnp.float32),  # maxima of blocks
            pltpu.VMEM((groups, _ROWS, _LANES), jnp.float32),  # log-sum-exps of blocks
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_BYTES),
        interpret=interpret,
    )(jnp.pad(floats, padding, constant_values=1.0), jnp.pad(integers, padding), logits)
    tokens, sums = found
    return SampledRows(tokens[:rows, 0], sums[:rows, 0], sums[:rows, 1], sums[:rows, 2])


def _kernel(
    vocabulary: int,
    floats: Any,
    integers: Any,
    logits: Any,
    tokens: Any,
    sums: Any,
    final: Any,
    maxima: Any,
    lses: Any,
) -> None:
    """`final` holds whole registers, a multiple of eight, -inf behind the vocabulary's end."""
    temperature, top_p, min_p = floats[:, 0:1], floats[:, 1:2], floats[:, 2:3]
    seeds, position, top_k = (integers[:, 0:1], integers[:, 1:2]), integers[:, 2:3], integers[:, 3:4]
    greedy = temperature == 0.0
    filtering = ~greedy & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    divisor = jnp.where(greedy, 1.0, temperature)

    _copy(vocabulary, logits, final)
    raw_largest = _row_max(final)
    raw_lse = raw_largest + jnp.log(_row_sum(final, lambda x: jnp.exp(x - raw_largest)))
    sums[:, 0:1] = raw_lse
    sums[:, 1:2] = raw_lse

    @pl.when(jnp.max(jnp.where(divisor == 1.0, 0.0, 1.0)) > 0.0)
    def _() -> None:
        _each(final, lambda x: x / divisor)
        largest = _row_max(final)
        sums[:, 1:2] = largest + jnp.log(_row_sum(final, lambda x: jnp.exp(x - largest)))

    @pl.when(jnp.max(jnp.where(filtering, 1.0, 0.0)) > 0.0)
    def _() -> None:
        _filter(vocabulary, final, filtering, top_k, top_p, min_p)

    groups = maxima.shape[0]
    lane = lax.broadcasted_iota(jnp.int32, (_ROWS, _LANES), 1)

    def summed(group: Any, best: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        block_max, block_lse = _block_sums(final, group, lane)
        maxima[group], lses[group] = block_max, block_lse
        index = group * _LANES + lane
        score = jnp.where(greedy, block_max, block_lse + _gumbel(seeds, position, BLOCK_LEVEL, index))
        largest, where, largest_lse = best
        better = score > largest
        return (
            jnp.where(better, score, largest),
            jnp.where(better, index, where),
            jnp.maximum(largest_lse, block_lse),
        )

    lowest = jnp.full((_ROWS, _LANES), -jnp.inf, jnp.float32)
    score, where, largest_lse = lax.fori_loop(
        0, groups, summed, (lowest, jnp.zeros((_ROWS, _LANES), jnp.int32), lowest)
    )
    winner = _first_largest(score, where)
    top = jnp.max(largest_lse, axis=1, keepdims=True)
    parts = lax.fori_loop(
        0, groups, lambda group, total: total + jnp.exp(lses[group] - top), jnp.zeros((_ROWS, _LANES))
    )
    sums[:, 2:3] = top + jnp.log(jnp.sum(parts, axis=1, keepdims=True))
    tokens[:, 0:1] = _token_of(final, winner, greedy, seeds, position, lane)


# Passes over a tile of rows in vector memory


def _copy(vocabulary: int, logits: Any, final: Any) -> None:
    whole = vocabulary // _LANES * _LANES

    def one(start: Any) -> None:
        final[:, pl.ds(start, _LANES)] = logits[:, pl.ds(start, _LANES)]

    _registers(0, whole, one)
    _registers(whole, final.shape[1], lambda start: _store(final, start, jnp.full((_ROWS, _LANES), -jnp.inf)))
    if whole < vocabulary:
        final[:, whole:vocabulary] = logits[:, whole:vocabulary]


def _store(reference: Any, start: Any, value: Any) -> None:
    reference[:, pl.ds(start, _LANES)] = value


def _registers(begin: int, end: int, one: Callable[[Any], None]) -> None:
    """Calls `one` with the first lane of each register in [begin, end), eight at a time where there are as many."""
    eights = (end - begin) // (8 * _LANES)

    def several(number: Any, carry: None) -> None:
        for part in range(8):
            one(pl.multiple_of(begin + (number * 8 + part) * _LANES, _LANES))

    lax.fori_loop(0, eights, several, None)
    for start in range(begin + eights * 8 * _LANES, end, _LANES):
        one(start)


def _reduced(final: Any, begin: Any, step: Callable[[Any, Any], Any]) -> Any:
    """A fold over the registers of `final`, whose number is a multiple of eight, by eight accumulators."""

    def several(number: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        start = pl.multiple_of(number * 8 * _LANES, 8 * _LANES)
        return tuple(
            step(part, final[:, pl.ds(start + place * _LANES, _LANES)]) for place, part in enumerate(parts)
        )

    return lax.fori_loop(0, final.shape[1] // (8 * _LANES), several, (begin,) * 8)


def _row_max(final: Any) -> Any:
    parts = _reduced(final, jnp.full((_ROWS, _LANES), -jnp.inf, jnp.float32), jnp.maximum)
    return jnp.max(functools.reduce(jnp.maximum, parts), axis=1, keepdims=True)


def _row_sum(final: Any, term: Callable[[Any], Any]) -> Any:
    """float32[8, 1]"""
    parts = _reduced(final, jnp.zeros((_ROWS, _LANES), jnp.float32), lambda total, x: total + term(x))
    pairs = [parts[place] + parts[place + 4] for place in range(4)]
    return jnp.sum((pairs[0] + pairs[2]) + (pairs[1] + pairs[3]), axis=1, keepdims=True)


def _each(final: Any, change: Callable[[Any], Any]) -> None:
    _registers(0, final.shape[1], lambda start: _store(final, start, change(final[:, pl.ds(start, _LANES)])))


# Filters


def _key(x: Any) -> Any:
    """int32 with the order of float32 `x`."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest_satisfying(holds: Callable[[Any], Any]) -> Any:
    """int32[8, 1]: by row, the largest threshold for which the monotone test `holds` is true."""
    lowest = jnp.full((_ROWS, 1), -(2**31), jnp.int32)
    found = jnp.where(holds(jnp.zeros((_ROWS, 1), jnp.int32)), jnp.zeros((_ROWS, 1), jnp.int32), lowest)

    def try_bit(number: Any, found: Any) -> Any:
        candidate = found | lax.shift_left(jnp.int32(1), 30 - number)
        return jnp.where(holds(candidate), candidate, found)

    return lax.fori_loop(0, 31, try_bit, found)


def _filter(vocabulary: int, final: Any, filtering: Any, top_k: Any, top_p: Any, min_p: Any) -> None:
    """Puts -inf in place of what top-k, then top-p, then min-p leave out, in rows that filter."""
    lowest = jnp.full((_ROWS, 1), -(2**31), jnp.int32)
    limits = filtering & (top_k > 0) & (top_k < vocabulary)
    k = jnp.where(limits, top_k, vocabulary).astype(jnp.float32)

    def reaches_k(threshold: Any) -> Any:  # counts below 2**24 are exact in float32
        return _row_sum(final, lambda x: jnp.where(_key(x) >= threshold, 1.0, 0.0)) >= k

    largest = _row_max(final)
    by_k = lax.cond(
        jnp.max(jnp.where(limits, 1.0, 0.0)) > 0.0, lambda: _largest_satisfying(reaches_k), lambda: lowest
    )
    by_k = jnp.where(limits, by_k, lowest)

    def weight(x: Any) -> Any:
        return jnp.where(_key(x) >= by_k, jnp.exp(x - largest), 0.0)

    def by_mass() -> Any:
        target = top_p * _row_sum(final, weight)

        def reaches_p(threshold: Any) -> Any:
            mass = _row_sum(final, lambda x: jnp.where(_key(x) >= threshold, weight(x), 0.0))
            return (mass >= target) & (mass > 0.0)

        return _largest_satisfying(reaches_p)

    cuts = filtering & (top_p < 1.0)
    by_p = lax.cond(jnp.max(jnp.where(cuts, 1.0, 0.0)) > 0.0, by_mass, lambda: lowest)
    threshold = jnp.where(filtering, jnp.maximum(by_k, jnp.where(cuts, by_p, lowest)), lowest)
    least = jnp.where(filtering & (min_p > 0.0), largest + jnp.log(min_p), -jnp.inf)
    _each(final, lambda x: jnp.where((_key(x) >= threshold) & (x >= least), x, -jnp.inf))


# The two levels of the sampler


def _block_sums(final: Any, group: Any, lane: Any) -> tuple[Any, Any]:
    """Maximum and log-sum-exp of the 128 blocks of a group, a lane each."""

    def several(number: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
        largest, total = sums
        for place in range(4):
            block = number * 4 + place
            start = pl.multiple_of(group * _GROUP + block * BLOCK, BLOCK)
            low, high = final[:, pl.ds(start, _LANES)], final[:, pl.ds(start + _LANES, _LANES)]
            top = jnp.max(jnp.maximum(low, high), axis=1, keepdims=True)
            safe = jnp.where(top == -jnp.inf, 0.0, top)
            part = jnp.sum(jnp.exp(low - safe) + jnp.exp(high - safe), axis=1, keepdims=True)
            largest = jnp.where(lane == block, top, largest)
            total = jnp.where(lane == block, part, total)
        return largest, total

    blocks = jnp.minimum(final.shape[1] // BLOCK - group * _LANES, _LANES)
    begin = (jnp.full((_ROWS, _LANES), -jnp.inf, jnp.float32), jnp.zeros((_ROWS, _LANES), jnp.float32))
    largest, total = lax.fori_loop(0, blocks // 4, several, begin)
    return largest, jnp.where(largest == -jnp.inf, 0.0, largest) + jnp.log(total)


def _token_of(final: Any, winner: Any, greedy: Any, seeds: Any, position: Any, lane: Any) -> Any:
    """int32[8, 1]: the token of the winning block, int32[8, 1], that has the largest logit and noise."""
    lowest = jnp.full((_ROWS, _LANES), -jnp.inf, jnp.float32)

    def look(block: Any, inside: tuple[Any, Any]) -> tuple[Any, Any]:
        start = pl.multiple_of(block * BLOCK, BLOCK)
        mine = winner == block
        return tuple(
            jnp.where(mine, final[:, pl.ds(start + half * _LANES, _LANES)], inside[half]) for half in range(2)
        )  # type: ignore[return-value]

    inside = lax.fori_loop(0, final.shape[1] // BLOCK, look, (lowest, lowest), unroll=4)
    ids = [winner * BLOCK + half * _LANES + lane for half in range(2)]
    scores = [
        logits + jnp.where(greedy, 0.0, _gumbel(seeds, position, TOKEN_LEVEL, which))
        for logits, which in zip(inside, ids, strict=True)
    ]
    second = scores[1] > scores[0]
    return _first_largest(jnp.where(second, scores[1], scores[0]), jnp.where(second, ids[1], ids[0]))


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
