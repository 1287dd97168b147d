"""What is compared with transformers: small model configurations, their weights and their inputs.

Everything is a pure function of names and shapes, so stored results need no stored weights. Random numbers
are raw Philox words, whose stream numpy never changes.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

BATCH, LENGTH = 2, 24

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN2: dict[str, Any] = {
    **_LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.05,
}

_MISTRAL: dict[str, Any] = {
    **_LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 5,
}
_QWEN3: dict[str, Any] = {
    **_QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
}
_GEMMA2: dict[str, Any] = {
    **_LLAMA,
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 16,
    "num_hidden_layers": 3,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 12,
    "sliding_window": 5,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
del _GEMMA2["hidden_act"]
_GEMMA3: dict[str, Any] = {
    **{key: value for key, value in _GEMMA2.items() if not key.endswith("softcapping")},
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 16,
    "sliding_window_pattern": 2,
}
_MIMO: dict[str, Any] = {**_QWEN2, "architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_DEEPSEEK_V2: dict[str, Any] = {
    **{key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.5,
}
_DEEPSEEK_V3: dict[str, Any] = {
    **{key: value for key, value in _DEEPSEEK_V2.items() if key != "topk_method"},
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

CASES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama tied": {**_LLAMA, "tie_word_embeddings": True},
    "llama one kv head": {**_LLAMA, "num_key_value_heads": 1},
    "llama no kv heads named": {key: _LLAMA[key] for key in _LLAMA if key != "num_key_value_heads"},
    "llama attention bias": {**_LLAMA, "attention_bias": True},
    "llama mlp bias": {**_LLAMA, "mlp_bias": True},
    "llama head_dim": {**_LLAMA, "head_dim": 24},
    "llama large epsilon": {**_LLAMA, "rms_norm_eps": 0.1},
    "llama linear": {**_LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama linear, old spelling": {**_LLAMA, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama dynamic": {**_LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "llama llama3": {**_LLAMA, "rope_scaling": _LLAMA_3, "rope_theta": 500000.0},
    "llama llama3, length beside": {
        **_LLAMA,
        "original_max_position_embeddings": 24,
        "rope_scaling": _LLAMA_3,
    },
    "llama yarn": {**_LLAMA, "rope_scaling": _YARN},
    "llama yarn defaults": {**_LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "llama yarn attention_factor": {**_LLAMA, "rope_scaling": {**_YARN, "attention_factor": 1.5}},
    "llama yarn mscale": {**_LLAMA, "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.4}},
    "llama yarn one mscale": {**_LLAMA, "rope_scaling": {**_YARN, "mscale": 0.7}},
    "llama yarn not truncated": {**_LLAMA, "rope_scaling": {**_YARN, "truncate": False}},
    "llama yarn step": {
        **_LLAMA,
        "rope_scaling": {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    },
    "llama rope_parameters": {
        **{key: _LLAMA[key] for key in _LLAMA if key != "rope_theta"},
        "rope_parameters": {**_LLAMA_3, "rope_theta": 20000.0},
    },
    "qwen2": _QWEN2,
    "qwen2 tied": {**_QWEN2, "tie_word_embeddings": True},
    "qwen2 yarn": {**_QWEN2, "rope_scaling": _YARN},
    "qwen2 window on no layer": {
        **_QWEN2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
    "qwen2 window on one layer": {
        **_QWEN2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "mimo": {**_MIMO, "rope_theta": 640000.0, "num_nextn_predict_layers": 1},
    "mistral": _MISTRAL,
    "mistral no window": {**_MISTRAL, "sliding_window": None, "head_dim": 12, "rms_norm_eps": 1e-2},
    "mistral one kv head": {
        **_MISTRAL,
        "num_key_value_heads": 1,
        "rope_theta": 1000000.0,
        "sliding_window": 1,
    },
    "qwen3": _QWEN3,
    "qwen3 tied, yarn": {**_QWEN3, "tie_word_embeddings": True, "rope_scaling": _YARN, "head_dim": 8},
    "qwen3 window, bias": {
        **_QWEN3,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe not normalised": {**_QWEN3_MOE, "norm_topk_prob": False, "num_experts_per_tok": 4},
    "qwen3_moe dense layers": {
        **_QWEN3_MOE,
        "num_hidden_layers": 3,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
        "num_experts_per_tok": 1,
    },
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v2 groups": {
        **_DEEPSEEK_V2,
        "q_lora_rank": 14,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v2 yarn": {
        **_DEEPSEEK_V2,
        "first_k_dense_replace": 0,
        "rope_scaling": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    },
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v3 yarn": {**_DEEPSEEK_V3, "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v3 not interleaved": {
        **_DEEPSEEK_V3,
        "rope_interleave": False,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
    },
    "gemma2": _GEMMA2,
    "gemma2 no caps": {**_GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma2 windows by layer": {
        **_GEMMA2,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_key_value_heads": 4,
        "attention_bias": True,
        "rms_norm_eps": 1e-2,
    },
    "gemma3": _GEMMA3,
    "gemma3 linear": {
        **{key: _GEMMA3[key] for key in _GEMMA3 if key not in ("rope_theta", "rope_local_base_freq")},
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "gemma3 untied, cap": {
        **_GEMMA3,
        "tie_word_embeddings": False,
        "final_logit_softcapping": 4.0,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 40,
    },
}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 weight of that Hugging Face name and layout: uniform, its deviation as `init_params` has it."""
    count = int(np.prod(shape))
    words = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(count)
    in_unit_interval = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    values = (in_unit_interval - np.float32(0.5)).reshape(shape)
    if name.endswith("norm.weight"):
        return 1 + values
    if name.endswith(".bias"):
        return values
    return values * np.float32((12 / shape[-1]) ** 0.5)


def inputs(vocab_size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """token_ids and positions, int32 [B, T]; the second row starts at position 9."""
    words = np.random.Philox(key=7).random_raw(BATCH * LENGTH)
    token_ids = (words % np.uint64(vocab_size)).astype(np.int32).reshape(BATCH, LENGTH)
    return token_ids, np.arange(LENGTH, dtype=np.int32) + np.array([[0], [9]], dtype=np.int32)


SMOLLM2_TEXT = (
    "Once upon a time there was a little girl who lived in a village near the forest. Every day she walked "
    "to the river, where she met an old man who told her stories about the sea and ships that sailed far "
    "away to strange countries with golden towers."
)
SMOLLM2_COLUMNS = np.arange(0, 49_152, 192)
"""Vocabulary entries whose logits are stored; the log-sum-exp of each row covers the rest."""

TRICKY_TEXTS = [
    "",
    " ",
    "  leading and trailing  ",
    "tabs\tand\n\nnewlines\r\n  \n x",
    "0 12 345 6789 1234567890 3.14 1,000 2nd \N{ARABIC-INDIC DIGIT THREE}\N{VULGAR FRACTION ONE HALF}",
    "I'm you're it's we'll they've he'd don't IT'S",
    "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve cafe\N{COMBINING ACUTE ACCENT} \N{LATIN SMALL LIGATURE FI}",
    "\u4f60\u597d \N{GRINNING FACE}\N{ZERO WIDTH JOINER}\N{ROCKET} \N{MUSICAL SYMBOL G CLEF}",
    "a\N{NO-BREAK SPACE}b\N{IDEOGRAPHIC SPACE}c\N{ZERO WIDTH SPACE}d",
    "def f(x):\n    return {x: [1, 2]}  # !?*&^%$",
    "<|im_start|>user\nhi<|im_end|>\n",
    "glued<|im_end|>together <|im_end|> <|endoftext|>",
    "<|im_start |> <|im_|end|> <not_special>",
    "supercalifragilisticexpialidocious " * 3,
    "\N{REPLACEMENT CHARACTER}\x00\x7f",
]
"""Digits, whitespace, contractions, combining characters, emoji, special tokens and what looks like them."""

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "  Capital of France? <|im_end|>"},
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "And of \N{SNOWMAN}?\n"},
    ],
]
