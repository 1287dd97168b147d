"""MiMo (dense, 7B): Qwen2 with multi-token-prediction heads of its own spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.models import mtp, qwen2
from rollout_spec.models.decoder import DecoderModel
from rollout_spec.models.family import Family


def _options(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    return {
        **qwen2.FAMILY.huggingface_options(config, faults),
        "attention_bias": bool(config.get("attention_bias", True)),
        "mtp": mtp.read_config(config, faults, "mimo"),
    }


FAMILY = Family(
    name="mimo",
    module=DecoderModel,
    huggingface_architectures=("MiMoForCausalLM",),
    huggingface_options=_options,
)
