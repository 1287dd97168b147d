"""Named arrays of a checkpoint, checked as a whole and put into the params tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes  # noqa: F401 (registers bfloat16 with numpy)
import numpy as np

from rollout_spec.errors import ModelLoadError
from rollout_spec.models import ModelConfig, Params
from rollout_spec.weights.names import Path, expected_shapes, from_hf, is_ignored, stack_parts


class LazyTensor(NamedTuple):
    """An array not read yet: its shape and type as stored, in Hugging Face's layout, and how to read it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    """A checkpoint's tensors are read into memory that nobody else holds; a GGUF file's may be views of it."""
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


def assemble(
    config: ModelConfig, tensors: Mapping[str, LazyTensor], dtype: Any, shardings: Params | None = None
) -> Params:
    """The params tree in `dtype`, reading one tensor at a time; names as Hugging Face's.

    shardings: a tree like the params, of where each weight belongs; None is the default device.

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
    parts = stack_parts(config)
    stacks: dict[Path, np.ndarray] = {}
    for name, shape in expected_shapes(config).items():
        part = parts.get(name)
        if part is None:
            _put(params, *_read(config, name, tensors[name], dtype), shardings)
            continue
        stack = stacks.get(part.path)
        if stack is None:
            stack = stacks[part.path] = np.empty((part.count, *shape[::-1]), dtype)
        stack[part.index] = from_hf(config, name, tensors[name].read())[1]
        if part.index == part.count - 1:
            _put(params, part.path, stacks.pop(part.path), shardings)
        del stack
    return params


def _read(config: ModelConfig, name: str, tensor: LazyTensor, dtype: Any) -> tuple[Path, np.ndarray]:
    """Path and array of one tensor; what was read is released on return."""
    path, array = from_hf(config, name, tensor.read())
    # A copy of our own: on CPU jax keeps the memory it is given, which may be a mapped file.
    return path, np.array(array, dtype=dtype, order="C")


def _put(params: Params, path: Path, array: np.ndarray, shardings: Params | None) -> None:
    """Moves one weight to its place, and to where its sharding says."""
    branch, sharding = params, shardings
    for part in path[:-1]:
        branch = branch.setdefault(part, {})
        sharding = None if sharding is None else sharding[part]
    branch[path[-1]] = jax.device_put(array, None if sharding is None else sharding[path[-1]])
