"""Named arrays of a checkpoint, checked as a whole and put into the params tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes  # noqa: F401 (registers bfloat16 with numpy)
import numpy as np

from rollout_spec.errors import ModelLoadError
from rollout_spec.models import ModelConfig, Params
from rollout_spec.weights.names import expected_shapes, from_hf, is_ignored


class LazyTensor(NamedTuple):
    """An array not read yet: its shape and type as stored, in Hugging Face's layout, and how to read it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    unreadable: str | None = None
    """Name of the stored type if it can't be read."""
    dtype: np.dtype | None = None
    """Of what `read` returns, where that is known beforehand."""


def faults_of(config: ModelConfig, tensors: Mapping[str, LazyTensor]) -> list[str]:
    """A sentence for every weight that is missing, unknown, of another shape or of an unreadable type."""
    expected = expected_shapes(config)
    missing = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in tensors]
    unknown = [
        f"unknown: {name} {tensor.shape}"
        for name, tensor in tensors.items()
        if name not in expected and not is_ignored(config, name)
    ]
    misshapen, unreadable = [], []
    for name, shape in expected.items():
        if name not in tensors:
            continue
        if tensors[name].shape != shape:
            misshapen.append(f"wrong shape: {name} is {tensors[name].shape}, expected {shape}")
        if tensors[name].unreadable:
            unreadable.append(f"stored as {tensors[name].unreadable}, which can't be read: {name}")
    return missing + unknown + misshapen + unreadable


def assemble(config: ModelConfig, tensors: Mapping[str, LazyTensor], dtype: Any) -> Params:
    """The params tree in `dtype`, reading one tensor at a time; names as Hugging Face's.

    Names, shapes and types are checked before anything is read; the ModelLoadError lists every fault.
    """
    faults = faults_of(config, tensors)
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ModelLoadError(
            f"the checkpoint does not fit the {config.architecture} model that its configuration describes, "
            f"{count}:\n  " + "\n  ".join(faults)
        )
    params: Params = {}
    for name in expected_shapes(config):
        _put(params, config, name, tensors[name], dtype)
    return params


def _put(params: Params, config: ModelConfig, name: str, tensor: LazyTensor, dtype: Any) -> None:
    """Read one tensor into its place; what was read is released on return."""
    path, array = from_hf(config, name, tensor.read())
    branch = params
    for part in path[:-1]:
        branch = branch.setdefault(part, {})
    # A copy of our own: on CPU jax keeps the memory it is given, which may be a mapped file.
    branch[path[-1]] = jax.device_put(np.array(array, dtype=dtype, order="C"))
