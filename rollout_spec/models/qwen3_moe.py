"""Qwen3-MoE: Qwen3 with experts in place of the MLP on most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.models import qwen3
from rollout_spec.models.config import ExpertsConfig
from rollout_spec.models.family import Family
from rollout_spec.models.sparse_decoder import SparseDecoderModel


def _options(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    layers = range(config.get("num_hidden_layers") or 0)
    return {
        **qwen3.options(config, faults),
        "experts": ExpertsConfig(
            num_experts=config.get("num_experts") or 128,
            num_chosen=config.get("num_experts_per_tok") or 8,
            intermediate_size=config.get("moe_intermediate_size") or 768,
            normalised=bool(config.get("norm_topk_prob", False)),
            layers=tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
        ),
    }


FAMILY = Family(
    name="qwen3_moe",
    module=SparseDecoderModel,
    huggingface_architectures=("Qwen3MoeForCausalLM",),
    huggingface_options=_options,
)
