"""A checksum of weights that does not depend on how they are laid out, sharded or sent.

The bits of each number, in the engine's layout and type, are mixed and summed up with odd factors that depend on row
and column, modulo 2**32, twice. Sums of integers come out the same in any order and over any number of devices; a
single changed bit always changes them. The sums, with names, shapes and types, are hashed to one text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import WeightUpdateError
from ..models import ModelConfig, abstract_params
from ..models.quantized import is_quantized, leaves_of
from . import adapters, names, sources, transfer
from .arrays import as_array

_SALTS = ((0x9E3779B9, 0x7F4A7C15), (0xF39CC060, 0x5CEDC834))


def checksum(config: ModelConfig, weights: Any, dtype: Any = jnp.float32) -> str:
    """What `engine.checksum()` says of an engine that serves these weights, as a text of 32 hexadecimal digits.

    weights: in any form that `update_weights` takes; one of them is on the device at a time. dtype: the
    engine's, to which they are rounded first. Raises WeightUpdateError unless they are whole.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets = {
        sources.key_of(keys): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
        for keys, leaf in jax.tree_util.tree_flatten_with_path(abstract_params(config, dtype))[0]
    }
    source = sources.open_source(weights)
    faults: list[str] = []
    sums: dict[sources.Key, jax.Array] = {}
    entries = source.entries(config, faults)
    if not source.streamed:
        entries = iter(list(entries))
        source.prepare(targets)
    for entry in entries:
        target = targets.get(entry.key)
        if target is None or adapters.as_adapter(entry.value) is not None:
            faults.append(f"no plain weight of this model: {entry.name}")
            continue
        array = as_array(sources.read(entry.value))
        transposed = entry.hf_layout and entry.key[-1] == "kernel"
        if tuple(array.shape) != (target.shape[::-1] if transposed else target.shape):
            faults.append(f"shape: {entry.name}: {tuple(array.shape)}")
            continue
        sums[entry.key] = jax.block_until_ready(sums_of(transfer.placed(array, target, transposed)))
        del entry, array
    faults += [f"missing: {'.'.join(key)}" for key in targets if key not in sums]
    if faults:
        raise WeightUpdateError("there is no checksum of these weights:\n  " + "\n  ".join(faults))
    return digest(config, dtype, [sums[key] for key in targets])


def begin(config: ModelConfig, params: dict) -> Callable[[], str]:
    """Starts summing a whole params tree up; what it returns waits for the sums and gives the checksum.

    A quantised kernel counts as the one that it was made from, which is what its sender has.
    """
    leaves = leaves_of(params)
    sums = [leaf.sums if is_quantized(leaf) else sums_of(leaf) for leaf in leaves]
    dtype = next(leaf.dtype for leaf in leaves if not is_quantized(leaf))
    return lambda: digest(config, dtype, sums)


def digest(config: ModelConfig, dtype: Any, sums: list[jax.Array]) -> str:
    """The text for the sums of all weights, uint32[2] each, in the order of the params tree."""
    lines = []
    for (name, shape), pair in zip(names.leaf_shapes(config).items(), jax.device_get(sums), strict=True):
        lines.append(f"{name} {shape} {np.dtype(dtype).name} {int(pair[0]):08x}{int(pair[1]):08x}\n")
    return hashlib.blake2b("".join(sorted(lines)).encode(), digest_size=16).hexdigest()


@jax.jit
def sums_of(array: jax.Array) -> jax.Array:
    """uint32[2] of a weight in the engine's layout: a vector or a matrix."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    bits = _mixed(bits.reshape(-1, bits.shape[-1]))
    # Behind a barrier, or XLA would compute the factors anew for every element.
    factors = [
        jax.lax.optimization_barrier(
            (_factors(bits.shape[0], row_salt), _factors(bits.shape[1], column_salt))
        )
        for row_salt, column_salt in _SALTS
    ]
    return jnp.stack([jnp.sum(bits * rows[:, None] * columns, dtype=jnp.uint32) for rows, columns in factors])


def _factors(count: int, salt: int) -> jax.Array:
    """`count` odd pseudo-random numbers, uint32."""
    return _mixed(jnp.arange(count, dtype=jnp.uint32) + jnp.uint32(salt)) | 1


def _mixed(bits: jax.Array) -> jax.Array:
    """uint32 numbers, one to one, so that each bit decides about all (the finaliser of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)
