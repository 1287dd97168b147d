"""Hugging Face names and layouts of weights, both ways.

Modules carry Hugging Face's names, so a weight's name follows from its path in the params tree:

    ("layers", 0, "mlp", "up_proj", "kernel")  [in, out]   model.layers.0.mlp.up_proj.weight  [out, in]
    (..., "bias")                                          ....bias
    ("norm", "scale")                                      model.norm.weight
    ("embed_tokens", "embedding")  [V, E]                  model.embed_tokens.weight  [V, E]
    ("lm_head", "kernel")  [E, V]                          lm_head.weight  [V, E]
    (..., "experts", "up_proj", "kernel")  [N, in, out]    ....experts.0.up_proj.weight  [out, in], and so on to N - 1

The matrices of a layer's experts are one stack in the params tree, and a weight each in a checkpoint.

A model with a tied head has no `lm_head`; if a checkpoint sends `lm_head.weight` all the same (some exporters
do), it is a second copy of the embedding and is ignored, as transformers does. So are `rotary_emb.inv_freq`
buffers, which follow from the config, and the copies of embedding
and output head that DeepSeek's files hold with each multi-token-prediction head. The heads' own weights, below ("mtp",
"heads", number), have the names of their form (`rollout_spec.models.mtp.FORMS`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import jax

from rollout_spec.errors import ModelLoadError
from rollout_spec.models.config import ModelConfig
from rollout_spec.models.mtp import huggingface_module, is_shared_copy
from rollout_spec.models.registry import Params, abstract_params

Path = tuple[str | int, ...]

_SUFFIXES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


@dataclasses.dataclass(frozen=True)
class Part:
    """One matrix of a stack: the stack's path, the matrix's number in it, and how many there are."""

    path: Path
    index: int
    count: int


def hf_name(path: Path, config: ModelConfig | None = None) -> str:
    """Hugging Face's name of the weight at a path of the params tree. Paths below "mtp" need the config."""
    *modules, leaf = path
    if modules[0] == "mtp":
        if config is None or config.mtp is None:
            raise ModelLoadError(f"the name of {path} depends on the form of the heads: give the config")
        return f"{huggingface_module(config, tuple(modules))}.{_SUFFIXES.get(str(leaf), str(leaf))}"
    prefix = "" if modules[0] == "lm_head" else "model."
    return prefix + ".".join(str(part) for part in modules) + "." + _SUFFIXES.get(str(leaf), str(leaf))


def _part_name(config: ModelConfig, path: Path, index: int) -> str:
    """Hugging Face's name of one matrix of the stack at that path."""
    *modules, projection, leaf = path
    return hf_name((*modules, index, projection, leaf), config)


@functools.lru_cache(maxsize=64)
def expected_paths(config: ModelConfig) -> MappingProxyType[str, Path]:
    """Path of every leaf of the params tree, by Hugging Face name, in the model's order.

    A stack goes by the name that its matrices would have without their number.
    """
    leaves = jax.tree_util.tree_flatten_with_path(abstract_params(config))[0]
    paths = [tuple(key.key for key in keys) for keys, _ in leaves]
    return MappingProxyType({hf_name(path, config): path for path in paths})


@functools.lru_cache(maxsize=64)
def expected_shapes(config: ModelConfig) -> MappingProxyType[str, tuple[int, ...]]:
    """Shape of every weight of a checkpoint in Hugging Face's layout ([out, in]), by Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in leaf_shapes(config).items():
        if len(shape) == 3:
            path = expected_paths(config)[name]
            shapes |= {_part_name(config, path, index): shape[1:] for index in range(shape[0])}
        else:
            shapes[name] = shape
    return MappingProxyType(shapes)


@functools.lru_cache(maxsize=64)
def leaf_shapes(config: ModelConfig) -> MappingProxyType[str, tuple[int, ...]]:
    """Shape of every leaf in Hugging Face's layout, by the names of `expected_paths`; stacks are [N, out, in]."""
    leaves = jax.tree.leaves(abstract_params(config))
    return MappingProxyType(
        {
            name: _hf_shape(path, leaf.shape)
            for (name, path), leaf in zip(expected_paths(config).items(), leaves, strict=True)
        }
    )


def _hf_shape(path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *shape[-2:][::-1]) if path[-1] == "kernel" else shape


@functools.lru_cache(maxsize=64)
def stack_parts(config: ModelConfig) -> MappingProxyType[str, Part]:
    """Where every matrix of a stack belongs, by Hugging Face name; empty for a model without experts."""
    return MappingProxyType(
        {
            _part_name(config, path, index): Part(path, index, shape[0])
            for (name, path), shape in zip(
                expected_paths(config).items(), leaf_shapes(config).values(), strict=True
            )
            if len(shape) == 3
            for index in range(shape[0])
        }
    )


def expected_names(config: ModelConfig) -> tuple[str, ...]:
    """Hugging Face names of all weights of a checkpoint."""
    return tuple(expected_shapes(config))


def is_ignored(config: ModelConfig, name: str) -> bool:
    """Whether a checkpoint may send this name though the model has no such weight (see the module's text)."""
    return (
        name.endswith(".rotary_emb.inv_freq")
        or is_shared_copy(config, name)
        or (config.tie_word_embeddings and name == "lm_head.weight")
    )


def from_hf(config: ModelConfig, name: str, array: Any) -> tuple[Path, Any]:
    """Path and array in this package's layout of one Hugging Face weight (numpy or jax; the dtype is kept).

    The path of a matrix of a stack ends with its number, behind the stack's own path.

    Raises ModelLoadError if the model has no such weight or the shape is another; callers that want all
    faults of a checkpoint at once compare with `expected_shapes` first.
    """
    part = stack_parts(config).get(name)
    path = expected_paths(config).get(name) if part is None else part.path
    if path is None or name not in expected_shapes(config):
        raise ModelLoadError(
            f"unknown weight {name!r}: the {config.architecture} model has none of that name"
        )
    shape = expected_shapes(config)[name]
    if tuple(array.shape) != shape:
        raise ModelLoadError(f"weight {name}: expected shape {shape}, got {tuple(array.shape)}")
    array = array.T if path[-1] == "kernel" else array
    return path if part is None else (*path, part.index), array


def to_hf(config: ModelConfig, params: Params) -> Iterator[tuple[str, Any]]:
    """(name, array) of every weight in Hugging Face's names and layout, as `from_hf` reads them."""
    for name, path in expected_paths(config).items():
        array: Any = params
        for part in path:
            array = array[part]
        if path[-1] != "kernel":
            yield name, array
        elif array.ndim == 3:
            yield from ((_part_name(config, path, index), matrix.T) for index, matrix in enumerate(array))
        else:
            yield name, array.T
