"""MiMo: a Qwen2 with layers for multi-token prediction beside it, which the trunk doesn't need."""

from __future__ import annotations

from rollout_spec.models import qwen2
from rollout_spec.models.decoder import DecoderModel
from rollout_spec.models.family import Family

FAMILY = Family(
    name="mimo",
    module=DecoderModel,
    huggingface_architectures=("MiMoForCausalLM",),
    huggingface_options=qwen2.FAMILY.huggingface_options,
    is_ignored=lambda config, name: name.startswith("model.mtp_layers."),
)
