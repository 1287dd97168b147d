"""The matrices of a layer's experts, which come one by one, gathered to the stacks that the engine keeps."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..loading.checkpoint import LazyTensor
from ..models import ModelConfig
from . import adapters, names
from .arrays import as_array


class Stacks:
    """Stacks that are being gathered. Arrays are copied as they come: their senders may let go of them."""

    def __init__(self, config: ModelConfig) -> None:
        self.parts = names.stack_parts(config)
        self._shapes = names.expected_shapes(config) if self.parts else {}
        self._gathered: dict[names.Path, dict[int, LazyTensor]] = {}
        self._done: set[names.Path] = set()

    def add(self, name: str, value: Any, faults: list[str]) -> Any:
        """Takes one matrix; the whole stack as an Entry once it is complete, else None."""
        from .sources import Entry

        part = self.parts[name]
        matrix = self._checked(name, value, faults)
        if matrix is None:
            return None
        gathered = self._gathered.setdefault(part.path, {})
        if part.index in gathered or part.path in self._done:
            faults.append(f"sent twice: {name}")
            return None
        gathered[part.index] = matrix
        if len(gathered) < part.count:
            return None
        self._done.add(part.path)
        matrices = [gathered[index] for index in range(part.count)]
        del self._gathered[part.path]
        shape, dtype = (part.count, *self._shapes[name][::-1]), matrices[0].dtype
        stack = LazyTensor(shape, functools.partial(_stacked, matrices, shape), dtype=dtype)
        return Entry(names.hf_name(part.path), tuple(map(str, part.path)), stack, hf_layout=False)

    def missing(self) -> list[str]:
        """A fault for every matrix that did not come, of stacks of which others did."""
        begun = {path: set(gathered) for path, gathered in self._gathered.items()}
        return [
            f"missing: {name}"
            for name, part in self.parts.items()
            if part.path in begun and part.index not in begun[part.path]
        ]

    def _checked(self, name: str, value: Any, faults: list[str]) -> LazyTensor | None:
        if adapters.as_adapter(value) is not None:
            faults.append(
                f"adapters of experts aren't supported: {name}; merge it into the weight and send that"
            )
            return None
        if not isinstance(value, LazyTensor):
            try:
                array = as_array(value)
            except ValueError as error:
                faults.append(f"not an array: {name}: {error}")
                return None
            copy = np.array(array)
            value = LazyTensor(copy.shape, lambda: copy, dtype=copy.dtype)
        if tuple(value.shape) != self._shapes[name]:
            faults.append(f"shape: {name}: expected {self._shapes[name]}, got {tuple(value.shape)}")
            return None
        if value.unreadable is not None or value.dtype is None:
            faults.append(f"dtype: {name}: can't be read as {value.unreadable}")
            return None
        return value


def _stacked(matrices: list[LazyTensor], shape: tuple[int, ...]) -> np.ndarray:
    stack = np.empty(shape, matrices[0].dtype)
    for index, matrix in enumerate(matrices):
        stack[index] = matrix.read().T
    return stack
