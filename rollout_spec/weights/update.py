"""Checking and staging new weights, before anything is replaced."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..errors import ModelLoadError, WeightUpdateError
from ..models import ModelConfig
from . import names

UpdateMode = Literal["drain", "interrupt", "inflight", "inflight_keep"]
UPDATE_MODES: tuple[UpdateMode, ...] = ("drain", "interrupt", "inflight", "inflight_keep")


@dataclass(frozen=True)
class WeightUpdateReport:
    """What a weight update did.

    version, previous_version: of the weights. applied: False if the engine had this version already and
    nothing was done. tensors, bytes: replaced. kept: names of weights that strict=False left as they were.
    ended: ids of the requests that mode "interrupt" ended or that "drain" saw through.
    recomputed: running sequences whose cache mode "inflight" dropped.
    stage_s, wait_s, swap_s: seconds of checking and copying, of draining, and of the swap itself.
    """

    version: int
    previous_version: int
    mode: UpdateMode
    applied: bool = True
    tensors: int = 0
    bytes: int = 0
    kept: tuple[str, ...] = ()
    ended: tuple[Any, ...] = ()
    recomputed: int = 0
    stage_s: float = 0.0
    wait_s: float = 0.0
    swap_s: float = 0.0


@dataclass
class StagedWeights:
    """Weights that passed every check, ready to be swapped in."""

    params: dict
    tensors: int = 0
    bytes: int = 0
    kept: list[str] = field(default_factory=list)


def stage(
    config: ModelConfig, current: dict, weights: Any, *, strict: bool = True, check_finite: bool = False
) -> StagedWeights:
    """Copies of `weights` in the layout and dtype of `current`, after all checks.

    Args:
        weights: a pytree shaped like `current` (dicts, nnx.State or an nnx.Module; numpy or jax leaves), a
            mapping or an iterable of (Hugging Face name, array), or a folder of safetensors.
        strict: weights that are missing are a fault; otherwise they stay as they are.
        check_finite: NaN and infinity are faults.

    Raises:
        WeightUpdateError: listing every missing, unknown or repeated weight, every wrong shape and dtype.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(current)
    slots = {_key(keys): (place, leaf) for place, (keys, leaf) in enumerate(leaves)}
    staged: dict[int, jax.Array] = {}
    faults: list[str] = []
    for shown, key, array, hf_layout in _entries(config, weights, faults):
        if key not in slots:
            faults.append(f"unknown: {shown}")
            continue
        place, old = slots[key]
        if place in staged:
            faults.append(f"sent twice: {shown}")
            continue
        found = _checked(shown, array, old, hf_layout, check_finite, faults)
        staged[place] = found if found is not None else old
    kept = [".".join(map(str, key)) for key, (place, _) in slots.items() if place not in staged]
    if strict:
        faults.extend(f"missing: {name}" for name in kept)
    elif not staged and not faults:
        faults.append("no weights at all were given")
    if faults:
        raise WeightUpdateError(
            f"the update was refused and the old weights stay, because of {len(faults)} fault(s):\n  "
            + "\n  ".join(faults)
        )
    merged = [staged.get(place, leaf) for place, (_, leaf) in enumerate(leaves)]
    return StagedWeights(
        params=jax.tree.unflatten(tree, merged),
        tensors=len(staged),
        bytes=sum(array.nbytes for array in staged.values()),
        kept=kept,
    )


_Key = tuple[str, ...]


def _key(keys: Iterable[Any]) -> _Key:
    """Path of a leaf as strings, so that layers match under int and str keys."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


def _entries(config: ModelConfig, weights: Any, faults: list[str]) -> Iterator[tuple[str, _Key, Any, bool]]:
    """(name to show, key in the params tree, array, whether it has Hugging Face's layout) of each weight."""
    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights)
    if isinstance(weights, nnx.State):
        weights = nnx.to_pure_dict(weights)
    if isinstance(weights, str | os.PathLike):
        weights = _folder(Path(weights))
    if isinstance(weights, Mapping) and any(isinstance(value, Mapping) for value in weights.values()):
        for key, leaf in _leaves(weights):
            yield ".".join(key), key, leaf, False
        return
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    if not isinstance(pairs, Iterable):
        raise WeightUpdateError(
            "weights must be a pytree shaped like engine.params, (name, array) pairs or a folder of "
            f"safetensors; got {type(weights).__name__}"
        )
    paths = names.expected_paths(config)
    for pair in pairs:
        try:
            name, array = pair
        except (TypeError, ValueError):
            faults.append(f"not a (name, array) pair: {type(pair).__name__}")
            return
        if not isinstance(name, str):
            faults.append(f"not a name: {name!r}")
        elif not names.is_ignored(config, name):
            path = paths.get(name)
            yield name, _key(path) if path is not None else (name,), array, True


def _leaves(tree: Any, path: _Key = ()) -> Iterator[tuple[_Key, Any]]:
    """Leaves of nested mappings and lists. jax's own flattening refuses keys it can't sort, like 0 and "1"."""
    if isinstance(tree, Mapping | list | tuple):
        for key, branch in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(branch, (*path, str(key)))
    else:
        yield path, tree


def _folder(path: Path) -> Iterator[tuple[str, Any]]:
    from ..loading import huggingface

    try:
        tensors = huggingface.tensors(path)
    except (ModelLoadError, OSError) as error:
        raise WeightUpdateError(f"can't read weights from {path}: {error}") from error
    for name, tensor in tensors.items():
        yield name, tensor.read()


def _checked(
    shown: str, array: Any, old: jax.Array, hf_layout: bool, check_finite: bool, faults: list[str]
) -> jax.Array | None:
    """A copy of `array` in `old`'s layout and dtype, or None with the faults noted."""
    if not isinstance(array, np.ndarray | jax.Array):
        try:
            array = np.asarray(array)
        except (TypeError, ValueError) as error:
            faults.append(f"not an array: {shown}: {error}")
            return None
    transposed = hf_layout and len(old.shape) == 2 and not shown.endswith("embed_tokens.weight")
    expected = old.shape[::-1] if transposed else old.shape
    wrong = []
    if tuple(array.shape) != tuple(expected):
        wrong.append(f"shape: {shown}: expected {tuple(expected)}, got {tuple(array.shape)}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        wrong.append(f"dtype: {shown}: expected a floating type ({old.dtype}), got {array.dtype}")
    faults.extend(wrong)
    if wrong:
        return None
    # Always a copy: the sender's optimizer may donate or overwrite its arrays in the next step.
    if isinstance(array, jax.Array):
        staged = _copied(jax.device_put(array, old.sharding), old.dtype, transposed)
    else:
        given = array.T if transposed else array
        staged = jax.device_put(np.array(given, dtype=old.dtype, order="C"), old.sharding)
    if check_finite and not bool(_all_finite(staged)):
        faults.append(f"not finite: {shown}")
        return None
    return staged


@functools.partial(jax.jit, static_argnums=(1, 2))
def _copied(array: jax.Array, dtype: np.dtype, transposed: bool) -> jax.Array:
    return jnp.array(array.T if transposed else array, dtype=dtype, copy=True)


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(array))


def warm_up(params: dict) -> None:
    """Compiles what staging arrays of the engine's own dtype needs, once for every shape of weight."""
    seen = set()
    for leaf in jax.tree.leaves(params):
        if leaf.shape in seen:
            continue
        seen.add(leaf.shape)
        _all_finite(_copied(leaf, leaf.dtype, False))
        if leaf.ndim == 2:
            _copied(jax.device_put(leaf.T, leaf.sharding), leaf.dtype, True)
