"""Hugging Face names and layouts of weights, both ways.

Modules carry Hugging Face's names, so a weight's name follows from its path in the params tree:

    ("layers", 0, "mlp", "up_proj", "kernel")  [in, out]   model.layers.0.mlp.up_proj.weight  [out, in]
    (..., "bias")                                          ....bias
    ("norm", "scale")                                      model.norm.weight
    ("embed_tokens", "embedding")  [V, E]                  model.embed_tokens.weight  [V, E]
    ("lm_head", "kernel")  [E, V]                          lm_head.weight  [V, E]

A model with a tied head has no `lm_head`; if a checkpoint sends `lm_head.weight` all the same (some exporters
do), it is a second copy of the embedding and is ignored, as transformers does. So are `rotary_emb.inv_freq`
buffers, which follow from the config.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import jax

from rollout_spec.errors import ModelLoadError
from rollout_spec.models.config import ModelConfig
from rollout_spec.models.registry import Params, abstract_params

Path = tuple[str | int, ...]

_SUFFIXES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


def hf_name(path: Path) -> str:
    """Hugging Face's name of the weight at a path of the params tree."""
    *modules, leaf = path
    prefix = "" if modules[0] == "lm_head" else "model."
    return prefix + ".".join(str(part) for part in modules) + "." + _SUFFIXES[str(leaf)]


@functools.lru_cache(maxsize=64)
def expected_paths(config: ModelConfig) -> MappingProxyType[str, Path]:
    """Path in the params tree of every weight the model needs, by Hugging Face name, in the model's order."""
    leaves = jax.tree_util.tree_flatten_with_path(abstract_params(config))[0]
    paths = [tuple(key.key for key in keys) for keys, _ in leaves]
    return MappingProxyType({hf_name(path): path for path in paths})


@functools.lru_cache(maxsize=64)
def expected_shapes(config: ModelConfig) -> MappingProxyType[str, tuple[int, ...]]:
    """Shape of every weight the model needs in Hugging Face's layout ([out, in]), by Hugging Face name."""
    leaves = jax.tree.leaves(abstract_params(config))
    return MappingProxyType(
        {
            name: leaf.shape[::-1] if path[-1] == "kernel" else leaf.shape
            for (name, path), leaf in zip(expected_paths(config).items(), leaves, strict=True)
        }
    )


def expected_names(config: ModelConfig) -> tuple[str, ...]:
    """Hugging Face names of all weights the model needs."""
    return tuple(expected_paths(config))


def is_ignored(config: ModelConfig, name: str) -> bool:
    """Whether a checkpoint may send this name though the model has no such weight (see the module's text)."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def from_hf(config: ModelConfig, name: str, array: Any) -> tuple[Path, Any]:
    """Path and array in this package's layout of one Hugging Face weight (numpy or jax; the dtype is kept).

    Raises ModelLoadError if the model has no such weight or the shape is another; callers that want all
    faults of a checkpoint at once compare with `expected_shapes` first.
    """
    path = expected_paths(config).get(name)
    if path is None:
        raise ModelLoadError(
            f"unknown weight {name!r}: the {config.architecture} model has none of that name"
        )
    shape = expected_shapes(config)[name]
    if tuple(array.shape) != shape:
        raise ModelLoadError(f"weight {name}: expected shape {shape}, got {tuple(array.shape)}")
    return path, array.T if path[-1] == "kernel" else array


def to_hf(config: ModelConfig, params: Params) -> Iterator[tuple[str, Any]]:
    """(name, array) of every weight in Hugging Face's names and layout, as `from_hf` reads them."""
    for name, path in expected_paths(config).items():
        array: Any = params
        for part in path:
            array = array[part]
        yield name, array.T if path[-1] == "kernel" else array
