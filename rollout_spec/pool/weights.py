"""How new weights reach the engines: once into the object store, in chunks, by a path, or from device to device."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from flax import nnx
from numpy.typing import NDArray

from ..errors import ConfigError, WeightUpdateError

_uuids = itertools.count(int.from_bytes(os.urandom(6), "little") << 8)


@dataclass(frozen=True, eq=False)
class PackedArray:
    """An array as bytes, so that dtypes numpy doesn't know (bfloat16) travel without a copy too. data: uint8[N]."""

    data: NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]

    def unpacked(self) -> NDArray[Any]:
        """The array, on the same memory."""
        import ml_dtypes  # noqa: F401  registers its dtypes by name

        return self.data.view(np.dtype(self.dtype)).reshape(self.shape)


Path = tuple[Any, ...]
Entry = tuple[Path, Any]
"""Keys from the root of a tree, or (name,), and the array."""


def entries_of(weights: Any) -> tuple[str, list[Entry]]:
    """The kind of `weights` ("tree" or "pairs") and its arrays with their keys.

    weights: a pytree of dicts, an nnx.State or nnx.Module; a mapping or an iterable of (name, array).
    """
    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights)
    if isinstance(weights, nnx.State):
        weights = nnx.to_pure_dict(weights)
    if isinstance(weights, Mapping) and any(isinstance(value, Mapping) for value in weights.values()):
        return "tree", list(_leaves(weights))
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    try:
        return "pairs", [((name,), value) for name, value in pairs]
    except (TypeError, ValueError) as error:
        raise WeightUpdateError(
            "weights must be a pytree shaped like the engine's params, (name, array) pairs or a path; "
            f"got {type(weights).__name__} ({error})"
        ) from error


def _leaves(tree: Any, path: Path = ()) -> Iterator[Entry]:
    if isinstance(tree, Mapping | list):
        for key, branch in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(branch, (*path, key))
    else:
        yield path, tree


def assembled(kind: str, entries: Iterable[Entry]) -> Any:
    """What `entries_of` took apart."""
    if kind == "pairs":
        return [(path[0], value) for path, value in entries]
    tree: dict[Any, Any] = {}
    for (*branches, leaf), value in entries:
        branch = tree
        for key in branches:
            branch = branch.setdefault(key, {})
        branch[leaf] = value
    return tree


def packed(value: Any) -> Any:
    """A PackedArray of an array (jax and torch through numpy); anything else, such as an adapter's triple, as it is."""
    if isinstance(value, tuple):
        return value
    try:
        array = np.ascontiguousarray(np.asarray(value))
    except Exception:
        return value  # the engine names what is wrong with it
    if array.dtype == object:
        return value
    return PackedArray(array.reshape(-1).view(np.uint8), array.dtype.name, np.shape(value))


def unpacked(value: Any) -> Any:
    """The array of a PackedArray."""
    return value.unpacked() if isinstance(value, PackedArray) else value


class StoredWeights:
    """One object in the store, which every engine of a node reads in place. Calling it gives the weights.

    Picklable; holds the object while it lives.
    """

    def __init__(self, weights: Any) -> None:
        kind, entries = entries_of(weights)
        self.kind = kind
        content = [(path, packed(value)) for path, value in entries]
        self.size_bytes = sum(value.data.nbytes for _, value in content if isinstance(value, PackedArray))
        self._ref = [ray.put(content)]  # in a list, so that Ray hands the reference on, not the content

    def __call__(self) -> Any:
        content = ray.get(self._ref[0])
        return assembled(self.kind, [(path, unpacked(value)) for path, value in content])


class ChunkedWeights:
    """Weights larger than the object store: kept by an actor of their own, read by engines a chunk at a time.

    Picklable; the copy goes with the last one that holds it.
    """

    def __init__(self, weights: Any, chunk_bytes: int) -> None:
        self.kind, entries = entries_of(weights)
        self._layout: list[tuple[Path, str, tuple[int, ...], int]] = []
        self._others: list[Entry] = []
        self._server: Any = ray.remote(_ChunkServer).options(num_cpus=0).remote()
        self.size_bytes = 0
        self._chunks = 0
        parts: list[NDArray[np.uint8]] = []
        room = chunk_bytes
        for path, value in entries:
            one = packed(value)
            if not isinstance(one, PackedArray):
                self._others.append((path, one))
                continue
            self._layout.append((path, one.dtype, one.shape, one.data.nbytes))
            self.size_bytes += one.data.nbytes
            rest = one.data
            while len(rest):
                parts.append(rest[:room])
                rest, room = rest[room:], room - len(parts[-1])
                if room == 0:
                    self._send(parts)
                    parts, room = [], chunk_bytes
        if parts:
            self._send(parts)

    def _send(self, parts: list[NDArray[np.uint8]]) -> None:
        ray.get(self._server.add.remote(np.concatenate(parts)))
        self._chunks += 1

    def __call__(self) -> Any:
        entries = []
        chunk: Any = np.zeros(0, np.uint8)
        number = 0
        for path, dtype, shape, size in self._layout:
            data, done = np.empty(size, np.uint8), 0
            while done < size:
                if not len(chunk):
                    chunk = ray.get(ray.get(self._server.chunk.remote(number))[0])
                    number += 1
                part = chunk[: size - done]
                data[done : done + len(part)] = part
                done, chunk = done + len(part), chunk[len(part) :]
            entries.append((path, PackedArray(data, dtype, shape).unpacked()))
        return assembled(self.kind, [*entries, *self._others])


class _ChunkServer:
    """Holds chunks outside the object store, and those that are being read inside it."""

    def __init__(self) -> None:
        self._chunks: list[NDArray[np.uint8]] = []
        self._stored: dict[int, Any] = {}

    def add(self, chunk: NDArray[np.uint8]) -> None:
        """The next chunk."""
        self._chunks.append(chunk.copy())

    def chunk(self, number: int) -> list[Any]:
        """A reference to a chunk, in a list. Engines that read at the same time read one object."""
        if number not in self._stored:
            self._stored[number] = ray.put(self._chunks[number])
        ref = self._stored[number]
        for other in sorted(self._stored)[:-2]:
            del self._stored[other]
        return [ref]


@dataclass(frozen=True)
class WeightsAtPath:
    """A folder or checkpoint that every engine reads itself."""

    path: str

    def __call__(self) -> str:
        return self.path


class DeviceWeights:
    """Weights that engines pull from the sender's devices themselves, past the object store.

    By jax.experimental.transfer, at `address` ("host:port"; port 0 takes a free one).

    Give it to `RolloutPool.update_weights`; the arrays must live until that returns.
    """

    def __init__(self, weights: Any, *, address: str = "127.0.0.1:0") -> None:
        import jax
        from jax.experimental import transfer

        self.kind, entries = entries_of(weights)
        self._paths = [path for path, _ in entries]
        self._arrays = [value for _, value in entries]
        faults = [path for path, value in entries if not isinstance(value, jax.Array)]
        if faults:
            raise ConfigError(f"DeviceWeights take jax arrays; others are at {faults[:5]}")
        client = next(iter(self._arrays[0].devices())).client
        host = address.rpartition(":")[0]
        self._server = transfer.start_transfer_server(client, address, [f"{host}:0"])
        self.size_bytes = sum(array.nbytes for array in self._arrays)

    def offer(self) -> PulledWeights:
        """One pull's worth, for one engine."""
        uuid = next(_uuids) & (2**62 - 1)
        self._server.await_pull(uuid, self._arrays)
        shapes = [(array.shape, array.dtype.name) for array in self._arrays]
        return PulledWeights(self._server.address(), uuid, self.kind, self._paths, shapes)

    def stored(self) -> StoredWeights:
        """A copy in the object store, for engines that start later, when these arrays may be gone."""
        return StoredWeights(assembled(self.kind, list(zip(self._paths, self._arrays, strict=True))))


_servers: list[Any] = []


@dataclass(frozen=True, eq=False)
class PulledWeights:
    """What an engine needs to pull DeviceWeights."""

    address: str
    uuid: int
    kind: str
    paths: list[Path]
    shapes: list[tuple[tuple[int, ...], str]]

    def __call__(self) -> Any:
        import jax
        from jax.experimental import transfer

        device = jax.devices()[0]
        if not _servers:
            host = self.address.rpartition(":")[0]
            _servers.append(transfer.start_transfer_server(device.client, f"{host}:0", [f"{host}:0"]))
        sharding = jax.sharding.SingleDeviceSharding(device)
        wanted = [
            jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding) for shape, dtype in self.shapes
        ]
        arrays = _servers[0].connect(self.address).pull(self.uuid, wanted)
        return assembled(self.kind, list(zip(self.paths, arrays, strict=True)))


WeightSource = Callable[[], Any]
