"""Decoder-only transformers as flax nnx modules; `registry` lists the families."""

from rollout_spec.models.config import ExpertsConfig, LatentConfig, ModelConfig, MTPConfig, RopeConfig
from rollout_spec.models.decoder import DecoderModel
from rollout_spec.models.registry import FAMILIES, Params, abstract_params, apply, build, init_params

__all__ = [
    "FAMILIES",
    "DecoderModel",
    "ExpertsConfig",
    "LatentConfig",
    "MTPConfig",
    "ModelConfig",
    "Params",
    "RopeConfig",
    "abstract_params",
    "apply",
    "build",
    "init_params",
]
