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
Way = tuple[jax.sharding.NamedSharding, ...]
"""Layouts between that in which an array comes and the engine's."""
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
    else:
        array = _brought(array, target, turned(target, transposed))
    return _copier(target.dtype, target.sharding, transposed)(array)


def groups(targets: Sequence[Target], *, small: bool) -> list[list[int]]:
    """Places of the weights that one program copies: what a dispatch costs is paid once a group, not once a weight.

    On one device that is all of them, unless the groups are to be small so that steps can run between two. On several
    it is GROUP_BYTES of each, or one weight, so that buffers of what they send each other are no larger.
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
    ready = [_brought(array, target, target.sharding) for array, target in zip(arrays, targets, strict=True)]
    return tree_copier(*types_of(ready, targets))(ready)


def types_of(
    arrays: Sequence[Any], targets: Sequence[Target]
) -> tuple[tuple[np.dtype, ...], tuple[jax.sharding.Sharding, ...], tuple[Way, ...]]:
    """What `tree_copier` has to know of them."""
    return (
        tuple(target.dtype for target in targets),
        tuple(target.sharding for target in targets),
        tuple(_way(array, target) for array, target in zip(arrays, targets, strict=True)),
    )


def _way(array: Any, target: Target) -> Way:
    """Layouts that an array has in between, so that XLA does not gather it whole on every device.

    It would where the target is split over some axes of its mesh and the same over the others. So the array is first
    split over all devices along the target's axis, in the order of its own devices, and then in the order in which
    gathering over those others gives the target.
    """
    sharding = target.sharding
    if array.sharding.is_equivalent_to(sharding, len(array.shape)) or not isinstance(
        sharding, jax.sharding.NamedSharding
    ):
        return ()
    mesh = sharding.mesh
    parts = [part if isinstance(part, tuple) else (part,) for part in sharding.spec if part is not None]
    others = tuple(
        axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and not any(axis in part for part in parts)
    )
    if not parts or not others:
        return ()
    axis = next(axis for axis, part in enumerate(sharding.spec) if part is not None)
    if target.shape[axis] % mesh.size:
        return ()
    before = [None] * axis
    in_a_row = jax.sharding.Mesh(mesh.devices.reshape(-1), ("all",))
    spread = (*before, (*parts[0], *others), *sharding.spec[axis + 1 :])
    return (
        jax.sharding.NamedSharding(in_a_row, jax.sharding.PartitionSpec(*before, "all")),
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spread)),
    )


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


def _brought(array: jax.Array, target: Target, sharding: jax.sharding.Sharding) -> jax.Array:
    """`array` where a program for the target's devices can take it in: as it is, cut into the same pieces on as many
    other devices, or else in the layout `sharding`."""
    if _can_be_compiled_together(array, target):
        return array
    mine, its = array.sharding, target.sharding
    if (
        isinstance(mine, jax.sharding.NamedSharding)
        and isinstance(its, jax.sharding.NamedSharding)
        and mine.mesh.size == its.mesh.size
    ):
        mesh = jax.sharding.Mesh(its.mesh.devices.reshape(mine.mesh.devices.shape), mine.mesh.axis_names)
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, mine.spec))
    return jax.device_put(array, sharding)


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


@functools.lru_cache(maxsize=256)
def tree_copier(
    dtypes: tuple[np.dtype, ...], shardings: tuple[jax.sharding.Sharding, ...], ways: tuple[Way, ...]
) -> Callable[[Sequence[Any]], list[jax.Array]]:
    """The jitted function from a list of arrays to copies of these types, laid out so, by these ways."""

    def copy(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        copies = []
        for array, dtype, way in zip(arrays, dtypes, ways, strict=True):
            array = jnp.array(array, dtype=dtype, copy=True)
            for sharding in way:
                array = jax.lax.with_sharding_constraint(array, sharding)
            copies.append(array)
        return copies

    return jax.jit(copy, out_shardings=list(shardings))


@functools.lru_cache(maxsize=64)
def _taker(shardings: tuple[jax.sharding.Sharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda arrays: arrays, donate_argnums=0, out_shardings=list(shardings))


@jax.jit
def all_finite(array: jax.Array) -> jax.Array:
    """Whether no number of it is NaN or infinite."""
    return jnp.all(jnp.isfinite(array))
