"""Writes a model as transformers reads it: the very weights that the engine serves, as float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rollout_spec.models import ModelConfig, Params
from rollout_spec.weights.names import to_hf


def save_huggingface(config: ModelConfig, params: Params, folder: Path) -> None:
    """Writes config.json and model.safetensors. Raises ValueError for families other than those of `_EXTRAS`."""
    if config.architecture not in _EXTRAS:
        raise ValueError(f"expected one of {', '.join(_EXTRAS)}, got {config.architecture}")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in to_hf(config, params)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    described = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
        "dtype": "float32",
        **_EXTRAS[config.architecture](config),
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2))


def _llama(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
    }


def _qwen2(config: ModelConfig) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}


def _gemma3(config: ModelConfig) -> dict[str, Any]:
    assert config.windowed_rope is not None
    windows = {window for window in config.windows if window is not None}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(config.query_scale or config.head_dim),
        "sliding_window": windows.pop(),
        "layer_types": ["full_attention" if one is None else "sliding_attention" for one in config.windows],
        "rope_local_base_freq": config.windowed_rope.theta,
        "final_logit_softcapping": config.logit_soft_cap,
        "attn_logit_softcapping": None,
    }


_EXTRAS = {"llama": _llama, "qwen2": _qwen2, "gemma3": _gemma3}
