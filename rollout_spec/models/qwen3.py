"""Qwen3 (dense): as Llama, with a norm over each head of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.models.decoder import DecoderModel
from rollout_spec.models.family import Family
from rollout_spec.models.windows import qwen_windows


def options(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """What the dense and the sparse Qwen3 have in common."""
    bias = bool(config.get("attention_bias", False))
    return {
        "qk_norm": True,
        "attention_bias": bias,
        "attention_out_bias": bias,
        "head_dim": config.get("head_dim") or 128,
        "windows": qwen_windows(config, faults),
    }


FAMILY = Family(
    name="qwen3",
    module=DecoderModel,
    huggingface_architectures=("Qwen3ForCausalLM",),
    huggingface_options=options,
    in_gguf=True,
    gguf_options=lambda value, fields, faults: {"qk_norm": True},
)
