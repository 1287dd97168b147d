"""Qwen2 and Qwen2.5 (dense): as Llama, with biases on the query, key and value projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.models.decoder import DecoderModel
from rollout_spec.models.family import Family


def _options(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    windowed = [kind for kind in config.get("layer_types") or () if kind != "full_attention"]
    if windowed:
        faults.append(f"layer_types: {len(windowed)} layers are {sorted(set(windowed))}; only full_attention")
    elif config.get("use_sliding_window") and "layer_types" not in config:
        first_windowed = config.get("max_window_layers", 28)
        if first_windowed < config.get("num_hidden_layers", 0) and config.get("sliding_window", 4096):
            faults.append(
                f"use_sliding_window=true windows the layers from {first_windowed} on; only full attention"
            )
    return {"attention_bias": True}


FAMILY = Family(
    name="qwen2",
    module=DecoderModel,
    huggingface_architectures=("Qwen2ForCausalLM",),
    huggingface_options=_options,
)
