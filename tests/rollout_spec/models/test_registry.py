"""Building models and random weights."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_spec.errors import ModelLoadError
from rollout_spec.models import FAMILIES, ModelConfig, abstract_params, apply, build, init_params

CONFIG = ModelConfig("qwen2", 40, 16, 24, 2, 4, 2, 8, 64, attention_bias=True)


def test_a_graph_is_built_once_for_equal_configs() -> None:
    assert build(CONFIG) is build(dataclasses.replace(CONFIG))
    assert hash(CONFIG) == hash(dataclasses.replace(CONFIG))


def test_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelLoadError, match=r"'mamba'.*gemma2.*llama.*qwen2"):
        build(dataclasses.replace(CONFIG, architecture="mamba"))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_params_have_the_names_and_shapes_announced(architecture: str) -> None:
    config = dataclasses.replace(CONFIG, architecture=architecture)
    abstract, params = abstract_params(config, jnp.bfloat16), init_params(config, dtype=jnp.bfloat16)
    assert jax.tree.structure(abstract) == jax.tree.structure(params)
    for announced, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(params), strict=True):
        assert (announced.shape, announced.dtype) == (leaf.shape, leaf.dtype)
    assert params["layers"][1]["mlp"]["up_proj"]["kernel"].shape == (16, 24)  # [in, out]
    assert params["embed_tokens"]["embedding"].shape == (40, 16)
    assert params["lm_head"]["kernel"].shape == (16, 40)
    assert set(params["layers"][0]["self_attn"]["q_proj"]) == {"kernel", "bias"}


def test_a_tied_head_has_no_weights_of_its_own() -> None:
    assert "lm_head" not in abstract_params(dataclasses.replace(CONFIG, tie_word_embeddings=True))


def test_random_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (jax.tree.leaves(init_params(CONFIG, seed)) for seed in (5, 5, 6))
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    assert all((x != y).any() for x, y in zip(first, other, strict=True))


def test_random_logits_depend_on_the_context_and_are_neither_flat_nor_peaked() -> None:
    params = init_params(CONFIG)
    rows = np.array([[1, 2, 3, 4], [9, 8, 7, 4]])
    logits = np.asarray(apply(CONFIG, params, rows))
    assert 0.3 < logits.std() < 3
    assert np.abs(logits[0, -1] - logits[1, -1]).max() > 0.1
