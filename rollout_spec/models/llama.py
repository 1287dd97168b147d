"""Llama 2 and 3 and models of the same shape (SmolLM2, TinyLlama)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.models.decoder import DecoderModel
from rollout_spec.models.family import Family


def _options(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    tensor_parallel = config.get("pretraining_tp", 1)
    if tensor_parallel not in (None, 1):
        faults.append(f"pretraining_tp={tensor_parallel!r}: only 1 is supported (sliced matrix products)")
    bias = bool(config.get("attention_bias", False))
    return {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }


FAMILY = Family(
    name="llama",
    module=DecoderModel,
    huggingface_architectures=("LlamaForCausalLM",),
    huggingface_options=_options,
    in_gguf=True,
    gguf_rotary_interleaved=True,
)
