"""Staging without an engine, for tests."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from rollout_spec.executor import weight_layout
from rollout_spec.weights import checksums
from rollout_spec.weights.names import to_hf
from rollout_spec.weights.served import ServedWeights
from rollout_spec.weights.staging import StagedWeights, StagingOptions, stage
from tests.helpers.tiny_models import TinyModel, tiny_model

OLD, NEW = tiny_model("llama-tied", 0), tiny_model("llama-tied", 1)


def stage_into(config: Any, params: Any, weights: Any, **options: Any) -> StagedWeights:
    """`weights` staged for an engine that serves `params`."""
    served = ServedWeights(params, functools.partial(checksums.begin, config))
    return stage(config, weight_layout(params)[0], served, weights, StagingOptions(**options))


def hf_arrays(model: TinyModel = NEW) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in to_hf(model.config, model.params)}


def assert_equal(params: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, params, expected)
