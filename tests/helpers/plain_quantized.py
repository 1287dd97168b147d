"""Weights as 8 bits hold them, in numpy float64, from the definition: a scale for each output channel.

A channel's scale is its largest number times the reciprocal of the type's largest, in float32 and cut to 17 bits;
numbers are divided by it, rounded to the type's nearest, and multiplied by it again.
"""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rollout_spec.weights.names import to_hf
from tests.helpers.plain_model import PlainModel
from tests.helpers.tiny_models import TinyModel, tiny_model

_TYPES = {"int8": (np.int8, 127.0), "fp8": (ml_dtypes.float8_e4m3fn, 448.0)}
_QUANTISED = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
)
_QUANTISED += ("gate_proj", "up_proj", "down_proj")


def plain_quantized(matrix: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.float64]:
    """What is left of a matrix float32[out, in] in the type of that name, float64[out, in]."""
    kind, largest = _TYPES[name]
    reach = np.abs(matrix).max(axis=1, keepdims=True)
    exact = (reach * np.float32(1 / largest)).astype(np.float64)
    fraction, exponent = np.frexp(np.where(exact == 0, 1.0, exact))
    scale = np.ldexp(np.floor(fraction * 2**17) / 2**17, exponent)
    scaled = (matrix / scale.astype(np.float32)).astype(np.float32)
    stored = np.round(scaled) if kind is np.int8 else scaled
    return np.clip(stored, -largest, largest).astype(kind).astype(np.float64) * scale


@functools.cache
def quantized_tiny_model(name: str, weight_dtype: str, seed: int = 0) -> TinyModel:
    """A tiny model whose plain twin computes with quantised weights; its params are the ones before."""
    model = tiny_model(name, seed)
    weights = {}
    for key, value in to_hf(model.config, model.params):
        array = np.asarray(value)
        module, kind = key.rsplit(".", 2)[-2:]
        chosen = module in _QUANTISED and kind == "weight"
        weights[key] = plain_quantized(array, weight_dtype) if chosen else array
    return dataclasses.replace(
        model, plain=PlainModel(model.config, weights.items(), model.config.max_length)
    )
