"""`load_model`: a model from a path, whatever its format."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rollout_spec.errors import ModelLoadError
from rollout_spec.loading import gguf_file, huggingface
from rollout_spec.loading.checkpoint import assemble
from rollout_spec.models import ModelConfig, Params
from rollout_spec.sharding import MeshLayout
from rollout_spec.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """What a checkpoint holds. `tokenizer` is None if a folder has no tokenizer.json."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None


def load_model(
    path: str | os.PathLike[str], dtype: Any = None, mesh: jax.sharding.Mesh | None = None
) -> LoadedModel:
    """Load a Hugging Face folder (config.json, *.safetensors, tokenizer.json) or a .gguf file.

    dtype: of all weights, whatever they are stored in; None means float32 on CPU and bfloat16 elsewhere (CPUs
    compute bfloat16 many times slower). mesh: where the weights go, each shard to its device; None is the default
    device. Weights are converted one at a time, so memory peaks at the model in
    `dtype` and one tensor. Raises ModelLoadError (a ValueError) that lists every fault found.
    """
    location = Path(path).expanduser()
    if not location.exists():
        raise ModelLoadError(
            f"{location} does not exist: expected a Hugging Face folder or a .gguf file on this machine "
            "(names on the Hugging Face hub are not downloaded)"
        )
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    if location.is_dir():
        config = huggingface.read_config(location)
        params = assemble(config, huggingface.tensors(location), dtype, _shardings(config, mesh))
        return LoadedModel(config, params, huggingface.read_tokenizer(location, config))
    if location.suffix == ".gguf":
        file = gguf_file.GGUFFile(location)
        params = assemble(file.config, file.tensors(), dtype, _shardings(file.config, mesh))
        return LoadedModel(file.config, params, file.tokenizer())
    raise ModelLoadError(f"{location} is neither a folder nor a .gguf file: expected one of the two")


def _shardings(config: ModelConfig, mesh: jax.sharding.Mesh | None) -> Params | None:
    return None if mesh is None else MeshLayout(mesh, config).params()
