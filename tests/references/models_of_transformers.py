"""transformers' own models of the reference cases. Needs torch and transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.references import cases


def build_model(raw: dict[str, Any]) -> transformers.PreTrainedModel:
    """transformers' model of a config.json, with the cases' weights, float32, eager attention."""
    config = transformers.AutoConfig.for_model(**copy.deepcopy(raw))  # it writes into the dicts it is given
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied head is listed once, as the embedding
            parameter.copy_(torch.from_numpy(cases.weight(name, tuple(parameter.shape))))
    return model


def model_logits(
    model: transformers.PreTrainedModel, token_ids: np.ndarray, positions: np.ndarray | None = None
) -> np.ndarray:
    """float32 [B, T, V]."""
    with torch.no_grad():
        return model(
            input_ids=torch.from_numpy(token_ids).long(),
            position_ids=None if positions is None else torch.from_numpy(positions).long(),
            use_cache=False,
        ).logits.numpy()


def load_smollm2(path: Path) -> transformers.PreTrainedModel:
    """The GGUF file as transformers reads it, dequantised to float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
