"""One file for a set of named arrays: checked, versioned, without pickle.

Layout: MAGIC (16 bytes); format version, header bytes and header checksum (three little-endian uint32); the
header, JSON with the caller's facts and each array's name, dtype, shape, offset and CRC-32; then the arrays, each at
a multiple of ALIGNMENT from the start of the file, so that it can be memory-mapped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import struct
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import HistoryError

MAGIC = b"rollout_spec.h\r\n\0"[:16]
FORMAT_VERSION = 2
ALIGNMENT = 1 << 16
"""A multiple of every system's page size."""
_PREFIX = struct.Struct("<III")


@dataclass(frozen=True)
class HistoryFile:
    """A file's content. The arrays are memory-mapped and read-only; offsets say where in the file each begins."""

    facts: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    offsets: dict[str, int]


@dataclass(frozen=True)
class _Entry:
    """An array in the header."""

    name: str
    dtype: str
    shape: list[int]
    bytes: int
    crc32: int


def write_file(path: str | os.PathLike[str], facts: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    """Writes facts and arrays (of plain dtypes), in this order; the file appears whole or not at all."""
    flat = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in arrays.items()}
    entries = [
        {
            "name": name,
            "dtype": arrays[name].dtype.str,
            "shape": arrays[name].shape,
            "bytes": len(flat[name]),
            "crc32": zlib.crc32(flat[name].data),
        }
        for name in arrays
    ]
    header = json.dumps({"facts": facts, "arrays": entries}).encode()
    target = os.path.realpath(path)  # a link stays one
    if os.path.exists(target) and not os.path.isfile(target):
        raise HistoryError(f"expected a file to write the history to, {os.fspath(path)} is something else")
    temporary = f"{target}.{secrets.token_hex(4)}"
    try:
        with open(temporary, "xb") as file:
            file.write(MAGIC + _PREFIX.pack(FORMAT_VERSION, len(header), zlib.crc32(header)) + header)
            for data in flat.values():
                file.write(bytes(-file.tell() % ALIGNMENT))
                file.write(data.data)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_file(file: BinaryIO) -> HistoryFile:
    """The content of an open file that `write_file` wrote.

    Raises HistoryError when it is another kind of file, of another format version, cut short or altered.
    """
    name = file.name
    start = file.read(len(MAGIC) + _PREFIX.size)
    if start[: len(MAGIC)] != MAGIC or len(start) < len(MAGIC) + _PREFIX.size:
        raise HistoryError(f"{name} is not a history file: expected one that save() wrote")
    version, header_bytes, header_crc = _PREFIX.unpack(start[len(MAGIC) :])
    if version != FORMAT_VERSION:
        raise HistoryError(
            f"{name} has history format {version}, this version of rollout_spec reads {FORMAT_VERSION}; "
            "save it again with the version that will read it"
        )
    header = file.read(header_bytes)
    if len(header) != header_bytes or zlib.crc32(header) != header_crc:
        raise HistoryError(f"{name} is damaged: its header is cut short or altered; restore or delete it")
    try:
        content = json.loads(header)
        facts, entries = dict(content["facts"]), [_Entry(**entry) for entry in content["arrays"]]
        kinds = [(np.dtype(entry.dtype), tuple(entry.shape)) for entry in entries]
        fitting = all(
            isinstance(entry.name, str)
            and all(type(n) is int and 0 <= n < 1 << 48 for n in (entry.bytes, *shape))
            and dtype.kind in "iuf"
            and dtype.itemsize * math.prod(shape) == entry.bytes
            for entry, (dtype, shape) in zip(entries, kinds, strict=True)
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HistoryError(f"{name} is no history: its header isn't what save() writes ({error})") from error
    if not fitting:
        raise HistoryError(f"{name} is no history: its header names arrays that can't be")
    whole = np.memmap(file, np.uint8, mode="r").view(np.ndarray)
    arrays: dict[str, NDArray[Any]] = {}
    offsets: dict[str, int] = {}
    faults, offset = [], len(start) + header_bytes
    for entry, (dtype, shape) in zip(entries, kinds, strict=True):
        padding = -offset % ALIGNMENT
        if whole[offset : offset + padding].any():
            faults.append(f"what stands before array {entry.name!r} is altered")
        offset += padding
        data = whole[offset : offset + entry.bytes]
        offsets[entry.name] = offset
        offset += entry.bytes
        if len(data) != entry.bytes:
            faults.append(f"array {entry.name!r} is cut short")
        elif zlib.crc32(data.data) != entry.crc32:
            faults.append(f"array {entry.name!r} is altered")
        else:
            arrays[entry.name] = data.view(dtype).reshape(shape)
    if len(whole) > offset:
        faults.append(f"{len(whole) - offset} bytes follow its end")
    if faults:
        raise HistoryError(f"{name} is damaged: {'; '.join(faults)}; restore or delete it")
    return HistoryFile(facts, arrays, offsets)
