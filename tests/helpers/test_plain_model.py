"""The plain float64 forward pass and the package's model compute the same logits."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.models import apply
from tests.helpers.tiny_models import CONFIGS, tiny_model


@pytest.mark.parametrize("name", CONFIGS)
def test_plain_model_agrees_with_the_jax_model(name: str) -> None:
    model = tiny_model(name)
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, 40)
    plain = model.plain.logits(tokens)
    np.testing.assert_allclose(apply(model.config, model.params, tokens[None])[0], plain, atol=1e-4)
    np.testing.assert_allclose(model.plain.last_logits(tokens[:17]), plain[16], atol=1e-12)
    assert 1.0 < plain.std() < 20.0, "distributions neither flat nor certain"
