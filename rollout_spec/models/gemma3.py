"""Gemma 3 (text): Gemma 2 with norms over heads in place of soft caps, windows on five layers of six, and a rotary
base of their own for these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollout_spec.models import gemma2
from rollout_spec.models.config import RopeConfig
from rollout_spec.models.decoder import DecoderModel
from rollout_spec.models.family import Family
from rollout_spec.models.windows import windows_of_layer_types

_PATTERN = 6
_LOCAL_THETA = 10_000.0


def _layer_types(num_layers: int, pattern: int) -> list[str]:
    """Every `pattern`-th layer sees everything."""
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]


def _options(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    layer_types = config.get("layer_types") or _layer_types(
        config.get("num_hidden_layers") or 0, config.get("sliding_window_pattern") or _PATTERN
    )
    if config.get("attn_logit_softcapping"):
        faults.append(
            "attn_logit_softcapping: a Gemma 3 has none (transformers reads it and doesn't apply it)"
        )
    return {
        **gemma2.shared_options(config, faults),
        "qk_norm": True,
        "windows": windows_of_layer_types(layer_types, config.get("sliding_window", 4096), faults),
        "logit_soft_cap": config.get("final_logit_softcapping"),
    }


def _gguf_options(value: Callable[..., Any], fields: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    num_layers, heads = fields["num_layers"], fields["num_heads"]
    window, pattern = value("attention.sliding_window"), value("attention.sliding_window_pattern", _PATTERN)
    kinds = [_KIND_OF_FLAG[bool(flag)] for flag in pattern] if isinstance(pattern, list) else None
    largest = num_layers == 62  # the 27B, whose queries are scaled by the model's width a head
    return {
        "activation": "gelu_tanh",
        "qk_norm": True,
        "query_scale": float(fields["hidden_size"] // heads if largest else fields["head_dim"]),
        "norm_offset": True,
        "output_norms": True,
        "scaled_embedding": True,
        "windows": windows_of_layer_types(kinds or _layer_types(num_layers, pattern), window, faults),
        "windowed_rope": RopeConfig(theta=float(value("rope.freq_base_swa", _LOCAL_THETA))),
        "logit_soft_cap": value("final_logit_softcapping"),
    }


_KIND_OF_FLAG = {True: "sliding_attention", False: "full_attention"}

FAMILY = Family(
    name="gemma3",
    module=DecoderModel,
    huggingface_architectures=("Gemma3ForCausalLM",),
    huggingface_options=_options,
    model_types=("gemma3_text",),
    rope_by_layer_type=True,
    default_rope_theta=1_000_000.0,
    options_read=gemma2.OPTIONS_READ,
    in_gguf=True,
    gguf_options=_gguf_options,
    gguf_norm_offset=True,
)
