"""Mistral: as Llama, on most models with a sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.models.decoder import DecoderModel
from rollout_spec.models.family import Family
from rollout_spec.models.windows import windows_of_layer_types


def _options(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    if config.get("layer_types"):
        faults.append("layer_types: a Mistral has the same attention on every layer (sliding_window)")
    sliding_window = config.get("sliding_window", 4096)
    if sliding_window is None:
        return {}
    kinds = ["sliding_attention"] * (config.get("num_hidden_layers") or 0)
    return {"windows": windows_of_layer_types(kinds, sliding_window, faults)}


FAMILY = Family(
    name="mistral",
    module=DecoderModel,
    huggingface_architectures=("MistralForCausalLM",),
    huggingface_options=_options,
)
