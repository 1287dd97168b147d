"""Hugging Face names and layouts, both ways."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from rollout_spec.errors import ModelLoadError
from rollout_spec.models import ModelConfig, init_params
from rollout_spec.weights import expected_names, expected_shapes, from_hf, is_ignored, to_hf

CONFIG = ModelConfig("llama", 40, 16, 24, 2, 4, 2, 8, 64)
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)


def test_names_are_those_of_a_llama_checkpoint() -> None:
    layer = [
        "input_layernorm.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    ]
    expected = {f"model.layers.{index}.{name}" for index in range(2) for name in layer}
    expected |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert set(expected_names(CONFIG)) == expected
    assert set(expected_names(TIED)) == expected - {"lm_head.weight"}


def test_biases_are_named_where_the_config_has_them() -> None:
    config = dataclasses.replace(CONFIG, attention_bias=True, attention_out_bias=True, mlp_bias=True)
    biases = {name for name in expected_names(config) if name.endswith(".bias") and ".0." in name}
    attention = {f"model.layers.0.self_attn.{x}_proj.bias" for x in "qkvo"}
    assert biases == attention | {f"model.layers.0.mlp.{x}_proj.bias" for x in ("gate", "up", "down")}


def test_layers_beyond_nine_keep_their_numbers() -> None:
    config = dataclasses.replace(CONFIG, num_layers=12)
    path, _ = from_hf(config, "model.layers.10.mlp.up_proj.weight", np.zeros((24, 16)))
    assert path == ("layers", 10, "mlp", "up_proj", "kernel")


def test_matrices_are_transposed_and_the_rest_kept() -> None:
    matrix = np.arange(24 * 16, dtype=np.float32).reshape(24, 16)
    path, array = from_hf(CONFIG, "model.layers.1.mlp.gate_proj.weight", matrix)
    assert path == ("layers", 1, "mlp", "gate_proj", "kernel")
    np.testing.assert_array_equal(array, matrix.T)
    table = np.ones((40, 16), np.float32)
    path, array = from_hf(CONFIG, "model.embed_tokens.weight", table)
    assert path == ("embed_tokens", "embedding")
    assert array is table
    assert expected_shapes(CONFIG)["lm_head.weight"] == (40, 16)


@pytest.mark.parametrize("config", [CONFIG, TIED])
def test_there_and_back_is_the_identity(config: ModelConfig) -> None:
    params = init_params(config, 3)
    sent = dict(to_hf(config, params))
    assert set(sent) == set(expected_names(config))
    assert {name: array.shape for name, array in sent.items()} == dict(expected_shapes(config))
    for name, array in sent.items():
        path, received = from_hf(config, name, array)
        kept = params
        for part in path:
            kept = kept[part]
        np.testing.assert_array_equal(received, kept)
    assert len(sent) == len(jax.tree.leaves(params))


def test_a_second_copy_of_a_tied_head_is_ignored_and_an_untied_one_is_not() -> None:
    assert is_ignored(TIED, "lm_head.weight")
    assert not is_ignored(CONFIG, "lm_head.weight")
    assert is_ignored(CONFIG, "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not is_ignored(CONFIG, "model.layers.0.self_attn.q_norm.weight")


def test_unknown_names_and_wrong_shapes_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        from_hf(CONFIG, "model.layers.2.mlp.up_proj.weight", np.zeros((24, 16)))
    with pytest.raises(ModelLoadError, match=r"expected shape \(24, 16\), got \(16, 24\)"):
        from_hf(CONFIG, "model.layers.1.mlp.up_proj.weight", np.zeros((16, 24)))
