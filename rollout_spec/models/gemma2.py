"""Gemma 2: norms of 1 + scale before and behind each part, GeGLU, soft caps, and a window on every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.models.decoder import DecoderModel
from rollout_spec.models.family import Family
from rollout_spec.models.windows import windows_of_layer_types

ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_tanh")
OPTIONS_READ = frozenset({"hidden_act", "tie_word_embeddings"})


def shared_options(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common."""
    activation = config.get("hidden_activation") or config.get("hidden_act") or ACTIVATIONS[0]
    if activation == "gelu":  # what early checkpoints say, who mean the approximation all the same
        activation = config.get("hidden_activation") or ACTIVATIONS[0]
    if activation not in ACTIVATIONS:
        faults.append(f"hidden_activation={activation!r}: only {ACTIVATIONS[0]!r} is supported")
    if config.get("use_bidirectional_attention"):
        faults.append("use_bidirectional_attention=true: only causal attention is supported")
    bias = bool(config.get("attention_bias", False))
    return {
        "activation": "gelu_tanh",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "head_dim": config.get("head_dim") or 256,
        "query_scale": float(config.get("query_pre_attn_scalar") or 256),
        "norm_offset": True,
        "output_norms": True,
        "scaled_embedding": True,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _options(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    layers = range(config.get("num_hidden_layers") or 0)
    layer_types = config.get("layer_types") or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in layers
    ]
    return {
        **shared_options(config, faults),
        "windows": windows_of_layer_types(layer_types, config.get("sliding_window", 4096), faults),
        "attention_soft_cap": config.get("attn_logit_softcapping", 50.0),
        "logit_soft_cap": config.get("final_logit_softcapping", 30.0),
    }


FAMILY = Family(
    name="gemma2",
    module=DecoderModel,
    huggingface_architectures=("Gemma2ForCausalLM",),
    huggingface_options=_options,
    options_read=OPTIONS_READ,
)
