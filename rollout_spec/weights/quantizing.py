"""Kernels quantised on the devices, where they lie: when an engine is made, and at every update of its weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..models.quantized import QuantizedArray, is_to_be_quantized, quantize
from .checksums import sums_of
from .sources import key_of
from .transfer import Target, to_host


class WeightQuantizer:
    """Quantises the leaves of one engine's params tree, which it knows by their number."""

    def __init__(self, layout: dict, dtype: Any) -> None:
        """layout: the params tree as jax.ShapeDtypeStructs with shardings. dtype: int8 or float8_e4m3fn."""
        self.dtype = np.dtype(dtype)
        found, tree = jax.tree_util.tree_flatten_with_path(layout)
        self._targets: list[Target] = [target for _, target in found]
        self._chosen = [is_to_be_quantized(key_of(keys)) for keys, _ in found]
        stored = [
            _stored(target, self.dtype) if chosen else target
            for target, chosen in zip(self._targets, self._chosen, strict=True)
        ]
        self.layout: dict = jax.tree.unflatten(tree, stored)
        """As `layout`, with a QuantizedArray of three for every kernel that is quantised."""

    def quantized(self, place: int, leaf: Any) -> Any:
        """Leaf number `place` as the engine keeps it; the same if it isn't quantised or is so already.

        A numpy array, which is to stay on the host, goes over the devices and back.
        """
        if not self._chosen[place] or isinstance(leaf, QuantizedArray):
            return leaf
        target = self._targets[place]
        program = _program(self.dtype, target.sharding, len(target.shape))
        if isinstance(leaf, np.ndarray):
            on_devices = program(jax.device_put(leaf, target.sharding))
            return QuantizedArray(*map(to_host, on_devices))
        return program(leaf)


def _stored(target: Target, dtype: np.dtype) -> QuantizedArray:
    values, scale, sums = _shardings(target.sharding, len(target.shape))
    return QuantizedArray(
        jax.ShapeDtypeStruct(target.shape, dtype, sharding=values),
        jax.ShapeDtypeStruct((*target.shape[:-2], target.shape[-1]), np.float32, sharding=scale),
        jax.ShapeDtypeStruct((2,), np.uint32, sharding=sums),
    )


def _shardings(sharding: jax.sharding.Sharding, ndim: int) -> QuantizedArray:
    """Where the parts of a kernel that lies so are to lie: scales with the output channels they belong to."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return QuantizedArray(sharding, sharding, sharding)
    axes = (*sharding.spec, *[None] * ndim)[:ndim]
    scale, everywhere = (
        jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
        for spec in ((*axes[:-2], axes[-1]), ())
    )
    return QuantizedArray(sharding, scale, everywhere)


@functools.lru_cache(maxsize=4096)
def _program(
    dtype: np.dtype, sharding: jax.sharding.Sharding, ndim: int
) -> Callable[[jax.Array], QuantizedArray]:
    def run(kernel: jax.Array) -> QuantizedArray:
        return QuantizedArray(*quantize(kernel, dtype), sums_of(kernel))

    return jax.jit(run, out_shardings=_shardings(sharding, ndim))
