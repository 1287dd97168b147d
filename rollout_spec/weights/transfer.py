"""Arrays on their way to where the engine keeps them: copied, converted, turned and resharded on the devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import Array

Target = jax.ShapeDtypeStruct
"""Shape, dtype and sharding of a weight in the engine."""
GROUP_BYTES = 2**26
"""Of weights on a device that one program copies; and after which a step may run."""


def placed(array: Array, target: Target, transposed: bool) -> jax.Array:
    """A copy of `array` (of its transpose) as `target` says, on the engine's devices.

    An array that lies on those devices in another layout is resharded by a compiled program, never gathered on
    one of them nor on the host. An array of numpy is read when this returns; of others that may still go on.
    """
    if isinstance(array, np.ndarray):
        if array.dtype == np.float64:  # jax would round it to float32 first
            array = array.astype(target.dtype)
        if _is_on_one_device(target):
            return jax.block_until_ready(_copier(target.dtype, target.sharding, transposed)(array))
        array = jax.block_until_ready(jax.device_put(array, turned(target, transposed)))
    elif not _can_be_compiled_together(array, target):
        array = jax.device_put(array, turned(target, transposed))
    return _copier(target.dtype, target.sharding, transposed)(array)


def groups(targets: Sequence[Target], *, small: bool) -> list[list[int]]:
    """Places of the weights that one program copies: what a dispatch costs is paid once a group, not once a weight.

    On one device that is all of them, unless the groups are to be small so that steps can run between two. On several it
    is GROUP_BYTES of each, or one weight, so that buffers of what they send each other are no larger.
    """
    if not small and all(_is_on_one_device(target) for target in targets):
        return [list(range(len(targets)))] if targets else []
    found: list[list[int]] = []
    room = 0
    for place, target in enumerate(targets):
        size = math.prod(target.sharding.shard_shape(target.shape)) * target.dtype.itemsize
        if size > room:
            found.append([])
            room = GROUP_BYTES
        found[-1].append(place)
        room -= size
    return found


def placed_together(arrays: Sequence[jax.Array], targets: Sequence[Target]) -> list[jax.Array]:
    """`placed` for a group, by one program."""
    ready = [
        array if _can_be_compiled_together(array, target) else jax.device_put(array, target.sharding)
        for array, target in zip(arrays, targets, strict=True)
    ]
    return tree_copier(*types_of(targets))(ready)


def types_of(
    targets: Sequence[Target],
) -> tuple[tuple[np.dtype, ...], tuple[jax.sharding.Sharding, ...]]:
    """Their dtypes and shardings, as `tree_copier` takes them."""
    return tuple(target.dtype for target in targets), tuple(target.sharding for target in targets)


def can_take_over(array: Any, target: Target) -> bool:
    """Whether `array` may serve as it is."""
    return (
        isinstance(array, jax.Array)
        and array.dtype == target.dtype
        and array.sharding.is_equivalent_to(target.sharding, array.ndim)
        and not array.is_deleted()
    )


def lies_as(array: Array, target: Target) -> bool:
    """Whether an array of numpy needs no work on the device."""
    return isinstance(array, np.ndarray) and array.dtype == target.dtype and array.flags.c_contiguous


def taken_over(arrays: Sequence[jax.Array], targets: Sequence[Target]) -> list[jax.Array]:
    """The same memory under new handles; the senders' handles say from now on that they were donated."""
    return _taker(tuple(target.sharding for target in targets))(list(arrays))


def to_host(array: jax.Array) -> np.ndarray:
    """A copy in host memory; the one on the devices is freed."""
    copy = np.array(array)
    array.delete()
    return copy


def _is_on_one_device(target: Target) -> bool:
    return len(target.sharding.device_set) == 1


def _can_be_compiled_together(array: jax.Array, target: Target) -> bool:
    """Whether one program may take `array` in and give `target` out: same devices in the same order."""
    return (
        array.committed
        and array.sharding.memory_kind == target.sharding.memory_kind
        and _devices(array.sharding) == _devices(target.sharding)
    )


def _devices(sharding: jax.sharding.Sharding) -> tuple[jax.Device, ...]:
    """In the order in which a program numbers them."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def turned(target: Target, transposed: bool) -> jax.sharding.Sharding:
    """Where the transpose of a target lies, so that turning it moves nothing between devices."""
    sharding = target.sharding
    if not transposed or not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    rows, columns = (*sharding.spec, None, None)[:2]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(columns, rows))


@functools.lru_cache(maxsize=4096)
def _copier(dtype: np.dtype, sharding: jax.sharding.Sharding, transposed: bool) -> Callable[[Any], jax.Array]:
    def copy(array: jax.Array) -> jax.Array:
        return jnp.array(array.T if transposed else array, dtype=dtype, copy=True)

    return jax.jit(copy, out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def tree_copier(
    dtypes: tuple[np.dtype, ...], shardings: tuple[jax.sharding.Sharding, ...]
) -> Callable[[Sequence[Any]], list[jax.Array]]:
    """The jitted function from a list of arrays to copies of these types, laid out so."""

    def copy(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return [jnp.array(array, dtype=dtype, copy=True) for array, dtype in zip(arrays, dtypes, strict=True)]

    return jax.jit(copy, out_shardings=list(shardings))


@functools.lru_cache(maxsize=64)
def _taker(shardings: tuple[jax.sharding.Sharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda arrays: arrays, donate_argnums=0, out_shardings=list(shardings))


@jax.jit
def all_finite(array: jax.Array) -> jax.Array:
    """Whether no number of it is NaN or infinite."""
    return jnp.all(jnp.isfinite(array))
