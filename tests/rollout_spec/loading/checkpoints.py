"""Writes the reference cases as Hugging Face folders and GGUF files."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

from rollout_spec.loading.gguf_file import GGUFFile
from rollout_spec.loading.huggingface_config import parse_config
from rollout_spec.models import ModelConfig
from rollout_spec.weights import expected_shapes
from tests.references import cases


def case_tensors(case: str) -> dict[str, np.ndarray]:
    """float32 weights of a reference case, in Hugging Face's names and layout."""
    shapes = expected_shapes(parse_config(cases.CASES[case]))
    return {name: cases.weight(name, shape) for name, shape in shapes.items()}


def stored_logits(case: str) -> np.ndarray:
    """transformers' logits of a case on `cases.inputs()`: float32 [B, T, V]."""
    with np.load(Path(cases.__file__).with_name("logits.npz")) as stored:
        return stored[case]


@functools.cache
def open_gguf(path: Path) -> GGUFFile:
    """The file, opened once a process: the library takes seconds to read SmolLM2's 97,000 strings."""
    return GGUFFile(path)


def write_folder(
    folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, shards: int = 1
) -> Path:
    """A Hugging Face folder without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        safetensors.numpy.save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard, names in enumerate(np.array_split(sorted(tensors), shards), start=1):
        file_name = f"model-{shard:05}-of-{shards:05}.safetensors"
        safetensors.numpy.save_file({str(name): tensors[name] for name in names}, folder / file_name)
        weight_map.update({str(name): file_name for name in names})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    metadata: Mapping[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """A GGUF file as llama.cpp's converter makes it: its names, its order of rotary rows, its metadata.

    tensors: in Hugging Face's names and layout. kind: of the matrices; vectors stay float32. metadata: further
    fields after the architecture's name ("rope.scaling.type"), or whole keys with a leading dot; leave_out: fields
    that are not written.
    """
    writer = gguf.GGUFWriter(path, config.architecture)
    fields: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.head_dim,
        ".tokenizer.ggml.eos_token_id": 2,
        **(metadata or {}),
    }
    for name, value in fields.items():
        if name in leave_out:
            continue
        key = name[1:] if name.startswith(".") else f"{config.architecture}.{name}"
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        add[type(value)](key, value)

    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config.architecture)
    name_map = gguf.get_tensor_name_map(architecture, config.num_layers)
    for name, array in tensors.items():
        if config.norm_offset and name.endswith("norm.weight"):
            array = 1 + array
        if config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
            halves = array.reshape(heads, 2, -1, *array.shape[1:])  # rows of each half of a head
            array = halves.swapaxes(1, 2).reshape(array.shape)  # halves' rows side by side
        stored_as = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        gguf_name = name_map.get_name(name, try_suffixes=(".weight", ".bias")) or name
        writer.add_tensor(gguf_name, gguf.quantize(array, stored_as), raw_dtype=stored_as)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
