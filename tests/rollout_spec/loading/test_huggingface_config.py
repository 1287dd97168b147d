"""Reading config.json: what is read, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_spec.errors import ModelLoadError
from rollout_spec.loading.huggingface_config import parse_config
from rollout_spec.models import RopeConfig
from tests.references.cases import CASES

LLAMA, QWEN2 = CASES["llama"], CASES["qwen2"]


def with_rope(scaling: dict[str, Any], **options: Any) -> RopeConfig:
    return parse_config({**LLAMA, "rope_scaling": scaling, **options}).rope


def test_sizes_and_options_are_read() -> None:
    config = parse_config(LLAMA)
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == (
        "llama",
        2,
        4,
        2,
    )
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (32, 48, 8)
    assert (config.vocab_size, config.max_position_embeddings, config.max_length) == (64, 64, 64)
    assert (config.rms_norm_eps, config.rope) == (1e-5, RopeConfig(theta=10_000.0))
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)
    assert not any((config.attention_bias, config.attention_out_bias, config.mlp_bias))
    qwen2 = parse_config(QWEN2)
    assert (qwen2.attention_bias, qwen2.attention_out_bias, qwen2.rope.theta) == (True, False, 1e6)


def test_several_end_tokens_and_those_given_beside() -> None:
    assert parse_config({**LLAMA, "eos_token_id": [2, 5]}).eos_token_ids == (2, 5)
    assert parse_config({**LLAMA, "eos_token_id": None}).eos_token_ids == ()
    assert parse_config(LLAMA, eos_token_ids=(7, 8)).eos_token_ids == (7, 8)


def test_the_model_type_stands_in_for_missing_class_names() -> None:
    raw = {key: value for key, value in QWEN2.items() if key != "architectures"}
    assert parse_config(raw).architecture == "qwen2"


@pytest.mark.parametrize(
    "names", [["MixtralForCausalLM"], ["LlamaForSequenceClassification"], None], ids=lambda names: str(names)
)
def test_unknown_architectures_are_refused_with_the_supported_ones(names: list[str] | None) -> None:
    raw = {**LLAMA, "architectures": names, "model_type": "mamba" if names is None else "llama"}
    with pytest.raises(ModelLoadError, match=r"unknown architecture .*LlamaForCausalLM, .*Qwen2ForCausalLM"):
        parse_config(raw)


def test_every_missing_field_is_listed() -> None:
    raw = {key: value for key, value in LLAMA.items() if key not in ("hidden_size", "vocab_size")}
    with pytest.raises(ModelLoadError) as caught:
        parse_config(raw)
    assert "hidden_size is missing" in str(caught.value)
    assert "vocab_size is missing" in str(caught.value)


def test_every_unsupported_option_is_listed_at_once() -> None:
    raw = {
        **LLAMA,
        "hidden_act": "gelu",
        "pretraining_tp": 2,
        "quantization_config": {"quant_method": "awq"},
        "num_key_value_heads": 3,
        "head_dim": 7,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "longrope", "factor": 4.0},
    }
    with pytest.raises(ModelLoadError, match="7 faults") as caught:
        parse_config(raw)
    for part in (
        "gelu",
        "pretraining_tp=2",
        "awq",
        "num_key_value_heads=3",
        "head_dim=7",
        "0.5",
        "'longrope'",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}, (None, 8)),
        ({"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8}, ()),
        ({"use_sliding_window": False, "max_window_layers": 0, "sliding_window": 8}, ()),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "use_sliding_window": True,
                "sliding_window": 3,
            },
            (3, None),
        ),
        ({"layer_types": ["full_attention", "full_attention"], "use_sliding_window": True}, ()),
    ],
)
def test_windows_of_qwen_layers(
    family: str, options: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert parse_config({**CASES[family], **options}).windows == windows


@pytest.mark.parametrize(
    ("case", "options", "named"),
    [
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is None"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation='relu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("gemma3", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_options_that_a_family_does_not_have_are_refused_by_name(
    case: str, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        parse_config({**CASES[case], **options})


def test_gemma3_layers_with_a_window_have_a_rotary_base_of_their_own() -> None:
    old, new = parse_config(CASES["gemma3"]), parse_config(CASES["gemma3 linear"])
    assert (old.rope, old.windowed_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))
    assert (new.rope, new.windowed_rope) == (RopeConfig("linear", 5e4, 8.0), RopeConfig(theta=300.0))
    assert (old.windows, old.query_scale, old.tie_word_embeddings) == ((5, None, 5), 16.0, True)


def test_both_spellings_of_rotary_options_agree() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = with_rope({"type": "linear", "factor": 2.0}, rope_theta=500.0)
    new = with_rope({}, rope_theta=None, rope_parameters={**scaling, "rope_theta": 500.0})
    assert old == new == RopeConfig("linear", 500.0, 2.0)


def test_the_original_length_beside_the_rotary_options_wins() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert with_rope(scaling).original_max_position_embeddings == 16
    assert with_rope(scaling, original_max_position_embeddings=32).original_max_position_embeddings == 32


def test_yarn_without_factor_takes_the_ratio_of_the_lengths() -> None:
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}
    assert with_rope(scaling).factor == 64 / 16


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor, high_freq_factor"),
        ({"rope_type": "made-up", "factor": 8.0}, "'made-up'"),
        ({"full_attention": {"rope_type": "default"}}, "by layer type"),
    ],
)
def test_incomplete_and_unknown_rotary_options_are_refused_by_name(
    scaling: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        with_rope(scaling)


def test_dynamic_scaling_limits_the_length() -> None:
    config = parse_config({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert config.rope.max_length == config.max_length == 64
