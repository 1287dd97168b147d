"""One safetensors file, mapped into memory and checked before anything of it is read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

from rollout_spec.errors import ModelLoadError
from rollout_spec.loading.checkpoint import LazyTensor

_FLOAT_TYPES = {  # others need scales to mean anything
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def tensors(path: Path) -> dict[str, LazyTensor]:
    """The file's tensors by name, none read yet. ModelLoadError if it is no whole safetensors file."""
    try:
        with safetensors.safe_open(path, framework="numpy"):  # checks the header against the size of the file
            pass
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except safetensors.SafetensorError as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error
    header.pop("__metadata__", None)
    mapping = _Mapping(path, 8 + header_bytes)
    return {name: mapping.tensor(entry) for name, entry in header.items()}


class _Mapping:
    """The file's bytes, mapped when the first tensor is read."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._start = start
        self._size = os.path.getsize(path)
        self._bytes: np.memmap | None = None

    def tensor(self, entry: dict) -> LazyTensor:
        stored_as, shape = entry["dtype"], tuple(entry["shape"])
        dtype = _FLOAT_TYPES.get(stored_as)
        if dtype is None:
            return LazyTensor(shape, lambda: self._refuse(stored_as), unreadable=stored_as)
        begin = self._start + entry["data_offsets"][0]
        return LazyTensor(shape, lambda: self._read(begin, shape, dtype), dtype=dtype)

    def _read(self, begin: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A read-only view of the mapped file."""
        try:
            size = os.path.getsize(self._path)
            if size != self._size:  # touching pages beyond its end would kill the process
                raise ModelLoadError(
                    f"{self._path} changed its size from {self._size:,} to {size:,} bytes while it was read"
                )
            if self._bytes is None:
                self._bytes = np.memmap(self._path, np.uint8, "r")
        except OSError as error:
            raise ModelLoadError(f"{self._path} can't be read any more: {error}") from error
        end = begin + math.prod(shape) * dtype.itemsize
        return self._bytes[begin:end].view(np.ndarray).view(dtype).reshape(shape)

    def _refuse(self, stored_as: str) -> np.ndarray:
        raise ModelLoadError(f"{self._path} holds a tensor stored as {stored_as}, which can't be read")
