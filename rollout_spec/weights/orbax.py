"""Orbax checkpoints, restored straight into the engine's shardings."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import WeightUpdateError
from ..loading.checkpoint import LazyTensor
from ..models import ModelConfig
from . import transfer
from .sources import Entry, Key, Pairs, Targets, signature

_TREE_FILE, _STEP_FILE = "_METADATA", "_CHECKPOINT_METADATA"
_ITEMS = ("default", "params", "model", "state")  # of a checkpoint of several trees, the one to take
_BRANCHES = ("params", "model")  # of a tree that holds more than weights, the branch to take
_LAST_NUMBER = re.compile(r"(\d+)$")
_UNFINISHED = "orbax-checkpoint-tmp"


def is_checkpoint(path: Path) -> bool:
    """Whether the folder is a finished checkpoint: of one tree, or of several side by side."""
    if not path.is_dir() or _UNFINISHED in path.name:
        return False
    return (path / _TREE_FILE).is_file() or ((path / _STEP_FILE).is_file() and bool(_items(path)))


def steps(path: Path) -> dict[int, Path]:
    """The finished checkpoints below a checkpoint manager's folder, by step, ascending."""
    found = {}
    for folder in path.iterdir() if path.is_dir() else ():
        number = _LAST_NUMBER.search(folder.name)
        if number and is_checkpoint(folder):
            found[int(number[1])] = folder
    return dict(sorted(found.items()))


def _items(path: Path) -> list[str]:
    return sorted(folder.parent.name for folder in path.glob(f"*/{_TREE_FILE}"))


@dataclass
class OrbaxCheckpoint:
    """A source of weights for `update_weights`.

    path: a checkpoint, or the folder of a CheckpointManager. step: which of the latter's; None is the last.
    item: which of the trees that were saved side by side; None looks for "default", "params", "model" or
    "state". branch: path of the weights in the tree, as ("model", "params"); None looks for "params" or "model" where
    the tree is no model itself. The tree is shaped like `engine.params`, or holds Hugging Face names.
    """

    path: str | os.PathLike[str]
    step: int | None = None
    item: str | None = None
    branch: tuple[str, ...] | None = None
    streamed: bool = False
    _restored: dict[Key, jax.Array] = field(default_factory=dict, repr=False)
    _wanted: dict[Key, tuple[Entry, Any]] = field(default_factory=dict, repr=False)
    _tree: Path = field(default=Path(), repr=False)
    _signature: Any = field(default=None, repr=False)

    def entries(self, config: ModelConfig, faults: list[str]) -> Iterator[Entry]:
        self._restored, self._wanted = {}, {}
        self._tree = self._locate(Path(self.path).expanduser())
        self._signature = signature(self._tree)
        tree, place = self._weights(self._metadata())
        for key, path, stored in _stored(tree, (), place):
            if not hasattr(stored, "shape"):
                faults.append(f"not an array: {'.'.join(key)}: {type(stored).__name__}")
                continue
            read: Any = functools.partial(self._restored.pop, path)
            value = LazyTensor(tuple(stored.shape), read, dtype=np.dtype(stored.dtype))
            if len(key) == 1 and "." in key[0]:
                found = list(Pairs([(key[0], value)]).entries(config, faults))
            else:
                found = [Entry(".".join(key), key, value, hf_layout=False)]
            for entry in found:
                self._wanted[path] = (entry, stored)
                yield entry

    def _locate(self, path: Path) -> Path:
        """The folder of the tree that holds the weights."""
        found = steps(path)
        if self.step is not None and self.step not in found:
            raise self._unreadable(
                f"there is no step {self.step}; there are: {', '.join(map(str, found)) or 'none'}"
            )
        if found:
            path = found[max(found) if self.step is None else self.step]
        if (path / _TREE_FILE).is_file():
            return path
        items = _items(path)
        candidates = [item for item in (_ITEMS if self.item is None else (self.item,)) if item in items]
        if self.item is None and len(items) == 1:
            candidates = items
        if not candidates:
            raise self._unreadable(
                f"expected a finished checkpoint with an item {self.item or ', '.join(_ITEMS)}; "
                f"it has: {', '.join(items) or 'none'}"
            )
        return path / candidates[0]

    def _metadata(self) -> Any:
        import orbax.checkpoint
        from etils import epath

        try:
            return orbax.checkpoint.PyTreeCheckpointHandler().metadata(epath.Path(self._tree)).tree
        except Exception as error:  # whatever a damaged checkpoint makes it raise
            raise self._unreadable(str(error)) from error

    def _weights(self, tree: Any) -> tuple[Any, Key]:
        """The branch of the stored tree that holds the weights, and its path."""
        place: Key = ()
        for part in self.branch or ():
            if not isinstance(tree, Mapping) or part not in tree:
                raise self._unreadable(f"its tree has no branch {'.'.join(self.branch or ())}")
            tree, place = tree[part], (*place, part)
        while self.branch is None and isinstance(tree, Mapping) and "embed_tokens" not in tree:
            inner = next((part for part in _BRANCHES if isinstance(tree.get(part), Mapping)), None)
            if inner is None:
                break
            tree, place = tree[inner], (*place, inner)
        return tree, place

    def prepare(self, targets: Targets) -> None:
        """Restores all of them at once, each straight into the engine's sharding."""
        import orbax.checkpoint as ocp

        item: dict = {}
        how: dict = {}
        for path, (entry, stored) in self._wanted.items():
            target = targets[entry.key]
            turned = transfer.turned(target, entry.hf_layout and entry.key[-1] == "kernel")
            shape = tuple(stored.shape)
            _set(item, path, jax.ShapeDtypeStruct(shape, stored.dtype))
            _set(how, path, ocp.ArrayRestoreArgs(sharding=turned, global_shape=shape, dtype=target.dtype))
        handler = ocp.PyTreeCheckpointHandler()
        try:
            with ocp.Checkpointer(handler) as checkpointer:
                restored = checkpointer.restore(
                    self._tree,
                    args=ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True),
                )
        except Exception as error:  # files that are gone or cut short, in the library's own words
            raise self._unreadable(str(error)) from error
        for path in self._wanted:
            branch = restored
            for part in path:
                branch = branch[part]
            self._restored[path] = branch

    def confirm(self) -> None:
        if signature(self._tree) != self._signature:
            raise self._unreadable("it was written to while it was read; send it again")

    def _unreadable(self, why: str) -> WeightUpdateError:
        return WeightUpdateError(f"can't read weights from the Orbax checkpoint {self.path}: {why}")


def _stored(tree: Any, key: Key, path: Key) -> Iterator[tuple[Key, Key, Any]]:
    """(key, path in the stored tree, what is known of it) of each leaf; "value" of nnx variables is no key."""
    if isinstance(tree, Mapping) and set(tree) == {"value"} and not isinstance(tree["value"], Mapping):
        yield key, (*path, "value"), tree["value"]
    elif isinstance(tree, Mapping):
        for part, branch in tree.items():
            yield from _stored(branch, (*key, str(part)), (*path, part))
    elif isinstance(tree, list | tuple):
        raise WeightUpdateError(f"the checkpoint has a list at {'.'.join(key)}; expected nested dicts")
    else:
        yield key, path, tree


def _set(tree: dict, path: Key, leaf: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = leaf
