"""One safetensors file, checked before anything of it is read.

It isn't mapped into memory: reading into aligned memory spares page faults and the copy that jax would make of a
mapping that begins anywhere, and touching a mapping of a file that was cut short meanwhile would kill the process.
"""

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
_ALIGNMENT = 64  # bytes, of memory that jax uses on a CPU as it is


def tensors(path: Path) -> dict[str, LazyTensor]:
    """The file's tensors by name, none read yet. ModelLoadError if it is no whole safetensors file."""
    try:
        with safetensors.safe_open(path, framework="numpy"):  # checks the header against the size of the file
            pass
    except safetensors.SafetensorError as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error
    file = _File(path)
    return {name: file.tensor(entry) for name, entry in file.header.items()}


class _File:
    """An open file. What is renamed over it later is not read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        header_bytes = int.from_bytes(self._file.read(8), "little")
        self._start = 8 + header_bytes
        memory = np.empty(header_bytes, np.uint8)
        self._read_into(memory, 8)
        self.header = json.loads(memory.tobytes())
        self.header.pop("__metadata__", None)

    def tensor(self, entry: dict) -> LazyTensor:
        stored_as, shape = entry["dtype"], tuple(entry["shape"])
        dtype = _FLOAT_TYPES.get(stored_as)
        if dtype is None:
            return LazyTensor(shape, lambda: self._refuse(stored_as), unreadable=stored_as)
        begin = self._start + entry["data_offsets"][0]
        return LazyTensor(shape, lambda: self._read(begin, shape, dtype), dtype=dtype)

    def _read(self, begin: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The tensor in memory of its own."""
        size = math.prod(shape) * dtype.itemsize
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        aligned = memory[start : start + size]
        try:
            self._read_into(aligned, begin)
        except OSError as error:
            raise ModelLoadError(f"{self._path} can't be read any more: {error}") from error
        return aligned.view(dtype).reshape(shape)

    def _read_into(self, memory: np.ndarray, begin: int) -> None:
        self._file.seek(begin)
        rest = memory.data
        while rest:
            count = self._file.readinto(rest)  # at most 2 GB at a time
            size = os.fstat(self._file.fileno()).st_size
            if not count or size != self._size:
                raise ModelLoadError(
                    f"{self._path} changed its size from {self._size:,} to {size:,} bytes while it was read"
                )
            rest = rest[count:]

    def _refuse(self, stored_as: str) -> np.ndarray:
        raise ModelLoadError(f"{self._path} holds a tensor stored as {stored_as}, which can't be read")
