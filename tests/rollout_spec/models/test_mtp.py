"""Multi-token-prediction heads: the equations in float64, the spellings of checkpoints, and strict loading."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rollout_spec.errors import ModelLoadError
from rollout_spec.loading import load_model
from rollout_spec.loading.huggingface_config import parse_config
from rollout_spec.models import ModelConfig, MTPConfig, Params, apply, build
from rollout_spec.weights.names import expected_names, hf_name, to_hf
from tests.helpers.plain_model import PlainModel
from tests.helpers.plain_mtp import PlainHeads
from tests.helpers.tiny_models import CONFIGS, random_params
from tests.rollout_spec.loading.checkpoints import write_folder

_RAW: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}

# config.json of each spelling, and names that its checkpoints have.
SPELLINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "deepseek on llama": (
        {"architectures": ["LlamaForCausalLM"], "num_nextn_predict_layers": 2},
        (
            "model.layers.2.enorm.weight",
            "model.layers.2.hnorm.weight",
            "model.layers.3.eh_proj.weight",
            "model.layers.3.shared_head.norm.weight",
            "model.layers.3.self_attn.q_proj.weight",
        ),
    ),
    "deepseek on qwen2": (
        {"architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 1, "tie_word_embeddings": True},
        ("model.layers.2.eh_proj.weight", "model.layers.2.self_attn.q_proj.bias"),
    ),
    "mimo": (
        {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
        (
            "model.mtp_layers.0.token_layernorm.weight",
            "model.mtp_layers.0.hidden_layernorm.weight",
            "model.mtp_layers.0.input_proj.weight",
            "model.mtp_layers.0.final_layernorm.weight",
            "model.mtp_layers.0.mlp.down_proj.weight",
            "model.mtp_layers.0.self_attn.k_proj.bias",
        ),
    ),
    "qwen3_next on llama": (
        {"architectures": ["LlamaForCausalLM"], "mtp_num_hidden_layers": 1},
        (
            "mtp.fc.weight",
            "mtp.norm.weight",
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.layers.0.mlp.up_proj.weight",
        ),
    ),
}


@functools.cache
def spelt(name: str) -> tuple[dict[str, Any], ModelConfig, Params, dict[str, np.ndarray]]:
    """config.json, what it means, random weights, and those by their names in checkpoints."""
    raw = {**_RAW, **SPELLINGS[name][0]}
    config = parse_config(raw)
    params = random_params(config, seed=3)
    tensors = {key: np.array(array, order="C") for key, array in to_hf(config, params)}
    return raw, config, params, tensors


def logits_ahead(config: ModelConfig, params: Params, token_ids: jax.Array, depths: int) -> jax.Array:
    return nnx.merge(build(config), params).logits_ahead(token_ids, depths)


@pytest.mark.parametrize("name", SPELLINGS)
def test_heads_agree_with_the_equations_in_float64(name: str) -> None:
    _, config, params, tensors = spelt(name)
    rows = np.random.default_rng(0).integers(0, config.vocab_size, (2, 9))
    heads = PlainHeads(PlainModel(config, tensors.items(), config.max_length))
    ours = np.asarray(logits_ahead(config, params, jnp.asarray(rows), 3))  # more depths than heads
    for row, tokens in enumerate(rows):
        for depth, expected in enumerate(heads.logits_ahead(tokens.tolist(), 3)):
            np.testing.assert_allclose(ours[depth, row, : len(expected)], expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_checkpoint_of_each_spelling_is_loaded_back(name: str, tmp_path: Path) -> None:
    raw, config, params, tensors = spelt(name)
    assert set(SPELLINGS[name][1]) <= set(tensors)
    loaded = load_model(write_folder(tmp_path, raw, tensors))
    assert loaded.config == config
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_head_that_is_promised_and_absent_is_an_error(name: str, tmp_path: Path) -> None:
    raw, _, _, tensors = spelt(name)
    lost = SPELLINGS[name][1][0]
    kept = {key: array for key, array in tensors.items() if key != lost}
    with pytest.raises(ModelLoadError, match=f"missing: {lost}"):
        load_model(write_folder(tmp_path, raw, kept))


@pytest.mark.parametrize("name", SPELLINGS)
def test_heads_that_nobody_takes_are_an_error(name: str, tmp_path: Path) -> None:
    raw, _, _, tensors = spelt(name)
    silent = {key: value for key, value in raw.items() if "predict" not in key and "mtp" not in key}
    with pytest.raises(ModelLoadError, match=f"unknown: {SPELLINGS[name][1][0]}"):
        load_model(write_folder(tmp_path, silent, tensors))


def test_copies_of_embedding_and_head_are_ignored_as_deepseek_writes_them(tmp_path: Path) -> None:
    raw, _, params, tensors = spelt("deepseek on llama")
    copies = {
        "model.layers.2.embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "model.layers.3.shared_head.head.weight": tensors["lm_head.weight"],
    }
    loaded = load_model(write_folder(tmp_path, raw, {**tensors, **copies}))
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    beyond = {"model.layers.4.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    with pytest.raises(ModelLoadError, match=r"unknown: model\.layers\.4\.embed_tokens"):
        load_model(write_folder(tmp_path / "beyond", raw, {**tensors, **beyond}))


def test_configs_with_heads_of_two_forms_or_of_too_many_are_refused() -> None:
    raw = {**_RAW, **SPELLINGS["qwen3_next on llama"][0]}
    with pytest.raises(ModelLoadError, match="two different forms"):
        parse_config({**raw, "num_nextn_predict_layers": 1})
    with pytest.raises(ModelLoadError, match="mtp_num_hidden_layers=2: at most 1"):
        parse_config({**raw, "mtp_num_hidden_layers": 2})
    with pytest.raises(ModelLoadError, match="num_nextn_predict_layers=-1"):
        parse_config({**_RAW, **SPELLINGS["mimo"][0], "num_nextn_predict_layers": -1})


def test_heads_change_no_logit_of_the_trunk() -> None:
    _, config, params, _ = spelt("deepseek on llama")
    bare = dataclasses.replace(config, mtp=None)
    trunk = {key: value for key, value in params.items() if key != "mtp"}
    rows = jnp.arange(8)[None]
    np.testing.assert_array_equal(apply(config, params, rows), apply(bare, trunk, rows))


def test_a_depth_reads_no_token_further_ahead_than_it_may() -> None:
    _, config, params, _ = spelt("deepseek on llama")
    rows = jnp.arange(8)[None]
    before = np.asarray(logits_ahead(config, params, rows, 2))
    after = np.asarray(logits_ahead(config, params, rows.at[0, 5].set(30), 2))
    for depth in range(2):
        same = 5 - depth - 1  # entry i reads tokens up to i + depth + 1
        np.testing.assert_array_equal(before[depth, 0, :same], after[depth, 0, :same])
        assert np.abs(before[depth, 0, same] - after[depth, 0, same]).max() > 1e-3


def test_the_name_of_a_heads_weight_needs_the_config() -> None:
    path = ("mtp", "heads", 0, "projection", "kernel")
    with pytest.raises(ModelLoadError, match="give the config"):
        hf_name(path)
    config = dataclasses.replace(CONFIGS["llama"], mtp=MTPConfig("mimo", 1))
    assert hf_name(path, config) == "model.mtp_layers.0.input_proj.weight"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_may_have_heads(name: str) -> None:
    """Windows, soft caps, experts and latents of the last layer are the head's too."""
    config = dataclasses.replace(CONFIGS[name], mtp=MTPConfig("deepseek", 1))
    params = random_params(config, seed=1)
    tensors = dict(to_hf(config, params))
    assert set(tensors) == set(expected_names(config))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 14)
    heads = PlainHeads(PlainModel(config, tensors.items(), config.max_length))
    ours = np.asarray(logits_ahead(config, params, jnp.asarray(tokens)[None], 2))
    for depth, expected in enumerate(heads.logits_ahead(tokens.tolist(), 2)):
        np.testing.assert_allclose(ours[depth, 0, : len(expected)], expected, atol=2e-4, rtol=0)
