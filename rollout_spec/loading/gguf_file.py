"""GGUF files (llama.cpp's format): configuration, dequantised tensors, tokenizer.

What differs from Hugging Face's layout: dimensions are listed innermost first (the `gguf` library's arrays
have them in the usual order); names are llama.cpp's; in some architectures the rows of q and k are permuted
for its rotary embedding; numbers are float32, so an epsilon of 1e-5 reads 9.999999747e-06.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from rollout_spec.errors import ModelLoadError
from rollout_spec.loading.checkpoint import LazyTensor
from rollout_spec.loading.gguf_tokenizer import build_tokenizer
from rollout_spec.models import FAMILIES, ModelConfig, RopeConfig
from rollout_spec.models.rope import yarn_attention_factor
from rollout_spec.tokenizer import Tokenizer
from rollout_spec.weights.names import expected_names

_FREQUENCY_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, float32 [D/2]: how converters store llama3's scaling."""


class GGUFFile:
    """One open GGUF file; tensors are memory-mapped and dequantised when read."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, OSError, IndexError, KeyError) as error:
            raise ModelLoadError(f"{path} is not a readable GGUF file: {error}") from error
        self._path = path
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.config = self._read_config()

    def metadata(self, key: str, default: Any = None) -> Any:
        """Value of a metadata field; float32 numbers as the shortest decimal that means the same float32."""
        field = self._reader.get_field(key)
        if field is None:
            return default
        value = field.contents()
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def tensors(self) -> dict[str, LazyTensor]:
        """Every tensor but the rotary factors, by Hugging Face name; unknown ones keep their own."""
        family = FAMILIES[self.config.architecture]
        hf_names = self._huggingface_names()
        found = {}
        for name, tensor in self._tensors.items():
            if name == _FREQUENCY_FACTORS:
                continue
            hf_name = hf_names.get(name, name)
            offset = -1.0 if family.gguf_norm_offset and hf_name.endswith("norm.weight") else 0.0
            heads = 0
            if family.gguf_rotary_interleaved and ".self_attn.q_proj." in hf_name:
                heads = self.config.num_heads
            elif family.gguf_rotary_interleaved and ".self_attn.k_proj." in hf_name:
                heads = self.config.num_kv_heads
            found[hf_name] = LazyTensor(
                tuple(int(size) for size in reversed(tensor.shape)),
                functools.partial(_read, tensor, heads, offset),
                unreadable=None if _can_dequantise(tensor) else tensor.tensor_type.name,
            )
        return found

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, rebuilt from the metadata."""
        return build_tokenizer(self.metadata, self.config)

    def _huggingface_names(self) -> dict[str, str]:
        architecture = next(
            key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.config.architecture
        )
        mapping = gguf.get_tensor_name_map(architecture, self.config.num_layers)
        names = {}
        for hf_name in (*expected_names(self.config), "lm_head.weight"):
            gguf_name = mapping.get_name(hf_name, try_suffixes=(".weight", ".bias"))
            if gguf_name is not None:
                names[gguf_name] = hf_name
        return names

    def _read_config(self) -> ModelConfig:
        architecture = self.metadata("general.architecture")
        known = sorted(family.name for family in FAMILIES.values() if family.in_gguf)
        if architecture not in known:
            raise ModelLoadError(
                f"unknown architecture {architecture!r} in {self._path}: supported are "
                f"{', '.join(known)} (docs/models.md says how to add one)"
            )
        if self.metadata("split.count", 1) > 1:
            raise ModelLoadError(
                f"{self._path} is one part of a split file: join it with llama-gguf-split --merge"
            )

        def value(key: str, default: Any = None) -> Any:
            return self.metadata(f"{architecture}.{key}", default)

        required = {
            "embedding_length": "hidden_size",
            "feed_forward_length": "intermediate_size",
            "block_count": "num_layers",
            "attention.head_count": "num_heads",
            "context_length": "max_position_embeddings",
            "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        }
        faults = [f"{architecture}.{key} is missing" for key in required if value(key) is None]
        by_layer = [key for key in (*required, "attention.head_count_kv") if isinstance(value(key), list)]
        faults += [f"{architecture}.{key} differs by layer: only one value for all" for key in by_layer]
        if "token_embd.weight" not in self._tensors:
            faults.append("tensor token_embd.weight is missing")
        if value("expert_count", 0):
            faults.append(
                f"{architecture}.expert_count={value('expert_count')}: mixtures of experts aren't supported"
            )
        if faults:
            raise self._refusal(faults)
        fields = {name: value(key) for key, name in required.items()}
        head_dim = value("attention.key_length") or fields["hidden_size"] // fields["num_heads"]
        if value("rope.dimension_count", head_dim) != head_dim:
            faults.append(
                f"{architecture}.rope.dimension_count={value('rope.dimension_count')}: only all {head_dim}"
            )
        if value("attention.value_length", head_dim) != head_dim:
            faults.append(f"{architecture}.attention.value_length differs from the key length {head_dim}")
        rope = self._read_rope(architecture, head_dim, fields["max_position_embeddings"], faults)
        if faults:
            raise self._refusal(faults)

        fields |= {
            "num_kv_heads": value("attention.head_count_kv", fields["num_heads"]),
            "head_dim": head_dim,
            "rope": rope,
        }
        family = FAMILIES[architecture]
        if family.gguf_options is not None:
            fields |= family.gguf_options(value, fields, faults)
        if faults:
            raise self._refusal(faults)

        ends = [self.metadata(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            tie_word_embeddings="output.weight" not in self._tensors,
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            attention_out_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_up.bias" in self._tensors,
            eos_token_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
            bos_token_id=self.metadata("tokenizer.ggml.bos_token_id"),
            **fields,
        )

    def _read_rope(self, architecture: str, head_dim: int, context: int, faults: list[str]) -> RopeConfig:
        def value(key: str, default: Any = None) -> Any:
            return self.metadata(f"{architecture}.rope.{key}", default)

        theta, kind = value("freq_base", 10_000.0), value("scaling.type", "none")
        factor = value("scaling.factor") or value("scale_linear") or 1.0
        if kind not in ("none", "linear", "yarn"):
            faults.append(f"{architecture}.rope.scaling.type={kind!r}: supported are none, linear and yarn")
            return RopeConfig(theta=theta)
        if _FREQUENCY_FACTORS in self._tensors:
            divisors = _read(self._tensors[_FREQUENCY_FACTORS])
            if kind == "yarn" or divisors.shape != (head_dim // 2,):
                faults.append(
                    f"tensor {_FREQUENCY_FACTORS} has shape {divisors.shape} beside scaling type {kind!r}: "
                    f"expected {(head_dim // 2,)} and none or linear"
                )
            scale = factor if kind == "linear" else 1.0
            return RopeConfig("factors", theta, frequency_factors=tuple(scale * float(x) for x in divisors))
        if kind == "yarn":
            if value("scaling.yarn_ext_factor", -1.0) not in (-1.0, 1.0):
                faults.append(f"{architecture}.rope.scaling.yarn_ext_factor: only 1 is supported")
            if value("scaling.yarn_log_multiplier", 0.0):
                faults.append(f"{architecture}.rope.scaling.yarn_log_multiplier isn't supported")
            own_factor = value("scaling.attn_factor", 1.0) * value("scaling.yarn_attn_factor", 1.0)
            return RopeConfig(
                "yarn",
                theta,
                factor,
                value("scaling.original_context_length", context),
                attention_factor=own_factor * yarn_attention_factor(factor),
                beta_fast=value("scaling.yarn_beta_fast", 32.0),
                beta_slow=value("scaling.yarn_beta_slow", 1.0),
            )
        if kind == "linear" and factor != 1.0:
            return RopeConfig("linear", theta, factor)
        return RopeConfig(theta=theta)

    def _refusal(self, faults: list[str]) -> ModelLoadError:
        return ModelLoadError(f"{self._path} can't be used, {len(faults)} faults:\n  " + "\n  ".join(faults))


def _can_dequantise(tensor: gguf.ReaderTensor) -> bool:
    """Whether the `gguf` library knows the type, tried on the first row."""
    try:
        gguf.dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], tensor.tensor_type)
    except NotImplementedError:
        return False
    return True


def _read(tensor: gguf.ReaderTensor, interleaved_heads: int = 0, offset: float = 0.0) -> np.ndarray:
    """float32 [out, in] or [out], plus `offset`; the rows of q and k, if interleaved, back in rotate-half order."""
    array = gguf.dequantize(tensor.data, tensor.tensor_type)
    if not interleaved_heads:
        return array + np.float32(offset) if offset else array
    # Row 2 d + j of a head holds what rotate-half keeps in row j D/2 + d.
    heads = array.reshape(interleaved_heads, -1, 2, *array.shape[1:])  # [H, D/2, 2, in]
    return heads.swapaxes(1, 2).reshape(array.shape)
