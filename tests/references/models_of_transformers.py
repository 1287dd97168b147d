"""transformers' own models of the reference cases. Needs torch and transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.references import cases

_STAND_INS = {"mimo": "qwen2"}
"""Families that transformers doesn't know, and the one whose network they have."""


def build_model(raw: dict[str, Any]) -> transformers.PreTrainedModel:
    """transformers' model of a config.json, with the cases' weights, float32, eager attention."""
    raw = copy.deepcopy(raw)  # it writes into the dicts it is given
    raw["model_type"] = _STAND_INS.get(raw["model_type"], raw["model_type"])
    config = transformers.AutoConfig.for_model(**raw)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied head is listed once, as the embedding
            parameter.copy_(torch.from_numpy(_weight(name, tuple(parameter.shape))))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.from_numpy(cases.weight(name, tuple(buffer.shape))))
    return model


def _weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A case's weight; those of experts, which checkpoints hold one by one, stacked as transformers keeps them."""
    layer, found, projection = name.rpartition(".experts.")
    if not found:
        return cases.weight(name, shape)
    expert = f"{layer}.experts.{{}}.{{}}.weight".format
    if projection == "down_proj":
        return np.stack([cases.weight(expert(index, projection), shape[1:]) for index in range(shape[0])])
    half = (shape[1] // 2, shape[2])
    return np.stack(
        [
            np.concatenate([cases.weight(expert(index, kind), half) for kind in ("gate_proj", "up_proj")])
            for index in range(shape[0])
        ]
    )


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
