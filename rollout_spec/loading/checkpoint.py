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
    """An array not read yet: its shape, in Hugging Face's layout, and how to read it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def faults_of(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """A sentence for every weight that is missing, unknown or of another shape; names as Hugging Face's."""
    expected = expected_shapes(config)
    faults = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in shapes]
    faults += [
        f"unknown: {name} {shapes[name]}"
        for name in shapes
        if name not in expected and not is_ignored(config, name)
    ]
    faults += [
        f"wrong shape: {name} is {shapes[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    return faults


def assemble(config: ModelConfig, tensors: Mapping[str, LazyTensor], dtype: Any) -> Params:
    """The params tree in `dtype`, reading one tensor at a time; ModelLoadError lists every fault before any read."""
    faults = faults_of(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if faults:
        raise ModelLoadError(
            f"the checkpoint does not fit the {config.architecture} model its configuration describes, "
            f"{len(faults)} faults:\n  " + "\n  ".join(faults)
        )
    params: Params = {}
    for name in expected_shapes(config):
        path, array = from_hf(config, name, tensors[name].read())
        branch = params
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
        branch[path[-1]] = jax.device_put(np.ascontiguousarray(array, dtype=dtype))
    return params
