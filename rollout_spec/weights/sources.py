"""The forms in which weights come, all read as entries: one named weight each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from ..errors import ModelLoadError, WeightUpdateError
from ..loading.checkpoint import LazyTensor
from ..models import ModelConfig
from . import adapters, names
from .stacks import Stacks

Key = tuple[str, ...]
"""Path of a leaf in the params tree, as strings, so that layers match under int and text keys."""
Targets = Mapping[Key, jax.ShapeDtypeStruct]
"""Shape, dtype and sharding that each weight has in the engine."""


@dataclass(frozen=True)
class Entry:
    """One weight as it was sent. name: as its sender calls it. hf_layout: kernels are [out, in].

    value: an array, an `Adapter`, or a LazyTensor, which is read when its turn comes.
    """

    name: str
    key: Key
    value: Any
    hf_layout: bool


class Source(Protocol):
    """Weights on their way in.

    streamed: entries can be read once, one after the other, so they are checked as they come; otherwise all are
    checked before the first is read.
    """

    streamed: bool

    def entries(self, config: ModelConfig, faults: list[str]) -> Iterator[Entry]:
        """The weights; notes in `faults` what is none."""

    def prepare(self, targets: Targets) -> None:
        """Called once all entries were found in order, before any is read."""

    def confirm(self) -> None:
        """Called once all were read: raises WeightUpdateError if the source changed meanwhile."""


def key_of(keys: Iterable[Any]) -> Key:
    """The Key of a path as `jax.tree_util` gives it."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


def open_source(weights: Any) -> Source:
    """What reads `weights`, whatever their form. WeightUpdateError if they have none that is known."""
    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights, nnx.Param)
    if isinstance(weights, nnx.State):
        weights = nnx.to_pure_dict(weights)
    if isinstance(weights, str | os.PathLike):
        return _open_path(Path(weights))
    if hasattr(weights, "entries") and hasattr(weights, "prepare"):
        return weights
    if isinstance(weights, Mapping) and any(isinstance(value, Mapping) for value in weights.values()):
        return Tree(weights)
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    if not isinstance(pairs, Iterable):
        raise WeightUpdateError(
            "weights must be a pytree shaped like engine.params, (name, array) pairs, or a folder of safetensors, "
            f"an Orbax checkpoint or a PEFT adapter; got {type(weights).__name__}"
        )
    return Pairs(pairs, streamed=not isinstance(weights, dict | list | tuple))


def _open_path(path: Path) -> Source:
    from . import orbax

    path = path.expanduser()
    if not path.exists():
        raise WeightUpdateError(f"can't read weights from {path}: it does not exist")
    if orbax.is_checkpoint(path) or orbax.steps(path):
        return orbax.OrbaxCheckpoint(path)
    if adapters.is_peft_folder(path):
        return Folder(path, lambda: adapters.peft_adapters(path))
    return Folder(path, lambda: _safetensors(path))


def _safetensors(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    from ..loading import huggingface

    yield from huggingface.tensors(path).items()


@dataclass
class Tree:
    """A pytree shaped like `engine.params`, or a part of one."""

    tree: Mapping
    streamed: bool = False

    def entries(self, config: ModelConfig, faults: list[str]) -> Iterator[Entry]:
        tree = self.tree
        if len(tree) == 1 and isinstance(tree.get("params"), Mapping):  # as flax linen wraps them
            tree = tree["params"]
        for key, leaf in leaves(tree):
            yield Entry(".".join(key), key, leaf, hf_layout=False)

    def prepare(self, targets: Targets) -> None:
        pass

    def confirm(self) -> None:
        pass


@dataclass
class Pairs:
    """(Hugging Face name, array or (A, B, scale)) pairs; nothing here holds one while the next is made."""

    pairs: Iterable[Any]
    streamed: bool = True

    def entries(self, config: ModelConfig, faults: list[str]) -> Iterator[Entry]:
        paths = names.expected_paths(config)
        stacks = Stacks(config)

        def entry(pair: Any) -> Entry | None:
            try:
                name, value = pair
            except (TypeError, ValueError):
                faults.append(f"not a (name, array) pair: {type(pair).__name__}")
                return None
            if not isinstance(name, str):
                faults.append(f"not a name: {name!r}")
                return None
            if names.is_ignored(config, name):
                return None
            if name in stacks.parts:
                return stacks.add(name, value, faults)
            path = paths.get(name)
            return Entry(name, (name,) if path is None else tuple(map(str, path)), value, hf_layout=True)

        # map and filter, unlike a loop with variables, let go of a pair before they ask for the next.
        yield from filter(None, map(entry, self.pairs))
        faults.extend(stacks.missing())

    def prepare(self, targets: Targets) -> None:
        pass

    def confirm(self) -> None:
        pass


@dataclass
class Folder:
    """Named tensors of a folder's files. A folder that changes while it is read is refused."""

    path: Path
    read: Callable[[], Iterator[tuple[str, Any]]]
    streamed: bool = False
    _signature: Any = field(default=None, repr=False)

    def entries(self, config: ModelConfig, faults: list[str]) -> Iterator[Entry]:
        self._signature = signature(self.path)
        try:
            pairs = list(self.read())
        except (ModelLoadError, OSError, ValueError, KeyError) as error:
            if isinstance(error, WeightUpdateError):
                raise
            raise WeightUpdateError(f"can't read weights from {self.path}: {error}") from error
        return Pairs(pairs).entries(config, faults)

    def prepare(self, targets: Targets) -> None:
        pass

    def confirm(self) -> None:
        if signature(self.path) != self._signature:
            raise WeightUpdateError(f"{self.path} was written to while its weights were read; send it again")


def leaves(tree: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Leaves of nested mappings and lists. jax's own flattening refuses keys it can't sort, like 0 and "1".

    A mapping of nothing but "value" is the leaf in it: so flax writes nnx variables into checkpoints.
    """
    if isinstance(tree, jax.Array | np.ndarray):  # most are; asking nnx of each takes milliseconds
        yield key, tree
        return
    if isinstance(tree, nnx.Variable):
        tree = tree[...]
    if isinstance(tree, Mapping) and set(tree) == {"value"} and not isinstance(tree["value"], Mapping):
        tree = tree["value"]
    if isinstance(tree, Mapping | list | tuple) and adapters.as_adapter(tree) is None:
        for part, branch in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(branch, (*key, str(part)))
    else:
        yield key, tree


def signature(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Name, size, time of change and number of every file below a folder; differs once one was written to."""
    found = []
    for file in sorted(path.rglob("*")):
        try:
            status = file.stat()
        except FileNotFoundError:  # removed since it was listed
            continue
        found.append((str(file.relative_to(path)), status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)


def read(value: Any) -> Any:
    """A LazyTensor's array; anything else as it is. WeightUpdateError if it can't be read."""
    if not isinstance(value, LazyTensor):
        return value
    try:
        return value.read()
    except (ModelLoadError, OSError) as error:
        raise WeightUpdateError(f"the update was refused and the old weights stay: {error}") from error


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], np.dtype | str]:
    """Of an array or LazyTensor, without reading it."""
    if isinstance(value, LazyTensor):
        return value.shape, value.dtype if value.dtype is not None else str(value.unreadable)
    return tuple(value.shape), value.dtype
