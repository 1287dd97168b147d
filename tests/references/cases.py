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
