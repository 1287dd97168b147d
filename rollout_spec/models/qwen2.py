"""Qwen2 and Qwen2.5 (dense): as Llama, with biases on the query, key and value projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.models.decoder import DecoderModel
from rollout_spec.models.family import Family
from rollout_spec.models.windows import qwen_windows


def _options(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    return {"attention_bias": True, "windows": qwen_windows(config, faults)}


FAMILY = Family(
    name="qwen2",
    module=DecoderModel,
    huggingface_architectures=("Qwen2ForCausalLM",),
    huggingface_options=_options,
    in_gguf=True,
)
