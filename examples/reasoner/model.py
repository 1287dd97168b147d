"""The policy's shape, and its checkpoint as a Hugging Face folder that `RolloutEngine.from_pretrained` reads."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from examples.reasoner.alphabet import END_ID, VOCABULARY_SIZE, make_tokenizer
from rollout_spec.models import ModelConfig, Params
from rollout_spec.weights.names import to_hf

CHECKPOINT = Path(__file__).parent / "checkpoint"
# Few layers: a step of one token costs little more than its calls, as on an accelerator.
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=VOCABULARY_SIZE,
    hidden_size=192,
    intermediate_size=512,
    num_layers=3,
    num_heads=6,
    num_kv_heads=3,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    eos_token_ids=(END_ID,),
)


def save_checkpoint(params: Params, folder: Path) -> None:
    """Writes config, tokenizer and weights, these as bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "max_position_embeddings": CONFIG.max_position_embeddings,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_theta": CONFIG.rope.theta,
        "tie_word_embeddings": CONFIG.tie_word_embeddings,
        "hidden_act": "silu",
        "eos_token_id": END_ID,
        "bos_token_id": None,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    make_tokenizer().backend.save(str(folder / "tokenizer.json"))
    weights = {
        name: np.ascontiguousarray(np.asarray(array).astype(ml_dtypes.bfloat16))
        for name, array in to_hf(CONFIG, params)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
