"""Loading GGUF files: SmolLM2 as it is published, and small files of every kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from rollout_spec.errors import ModelLoadError
from rollout_spec.loading import load_model
from rollout_spec.loading.checkpoint import assemble
from rollout_spec.loading.gguf_file import GGUFFile
from rollout_spec.loading.huggingface_config import parse_config
from rollout_spec.models import ModelConfig, RopeConfig, apply
from rollout_spec.models.rope import inverse_frequencies
from tests.references import cases
from tests.rollout_spec.loading.checkpoints import case_tensors, open_gguf, stored_logits, write_gguf

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_beta_fast": 2.0,
    "rope.scaling.yarn_beta_slow": 0.05,
}


def write_case(path: Path, case: str, **options: Any) -> tuple[Path, ModelConfig]:
    config = parse_config(cases.CASES[case])
    return write_gguf(path / "model.gguf", config, case_tensors(case), **options), config


@pytest.mark.model
def test_smollm2_has_transformers_logits(smollm2_path: Path) -> None:
    """To 1e-4, most of it the rounding of float32: the first token's activations reach 22,552, where neighbouring
    float32 numbers lie 0.002 apart, and transformers' own logits differ from float64's by up to 1e-4."""
    file = open_gguf(smollm2_path)
    params = assemble(file.config, file.tensors(), np.float32)
    with np.load(Path(cases.__file__).with_name("smollm2.npz")) as arrays:
        stored = dict(arrays)
    logits = np.asarray(apply(file.config, params, stored["token_ids"])[0])
    chosen = logits[:, cases.SMOLLM2_COLUMNS]
    np.testing.assert_allclose(chosen, stored["columns"], atol=1e-4, rtol=1e-5)
    assert np.sqrt(np.mean((chosen - stored["columns"]) ** 2)) < 3e-5
    log_sum_exp = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
    np.testing.assert_allclose(log_sum_exp, stored["log_sum_exp"], atol=1e-4, rtol=1e-5)
    np.testing.assert_array_equal(logits.argmax(axis=-1), stored["argmax"])


@pytest.mark.model
def test_smollm2_has_the_published_configuration(smollm2_path: Path) -> None:
    assert open_gguf(smollm2_path).config == ModelConfig(
        architecture="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100_000.0),
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


@pytest.mark.parametrize(
    ("case", "metadata"),
    [
        ("llama", {}),
        ("llama tied", {}),
        ("llama attention bias", {}),
        ("llama mlp bias", {}),
        ("llama head_dim", {}),
        ("llama linear", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ("llama yarn", YARN),
        ("llama yarn attention_factor", {**YARN, "rope.scaling.attn_factor": 1.5 / (0.1 * np.log(4.0) + 1)}),
        ("qwen2", {}),
        ("qwen2 tied", {}),
        ("qwen3", {}),
        ("gemma3", {"attention.sliding_window": 5, "attention.sliding_window_pattern": 2}),
        (
            "gemma3",
            {"attention.sliding_window": 5, "attention.sliding_window_pattern": [True, False, True]},
        ),
    ],
)
def test_small_files_give_transformers_logits(tmp_path: Path, case: str, metadata: dict[str, Any]) -> None:
    metadata = {key: float(value) if isinstance(value, float) else value for key, value in metadata.items()}
    path, _ = write_case(tmp_path, case, metadata=metadata)
    file = GGUFFile(path)
    params = assemble(file.config, file.tensors(), np.float32)
    logits = apply(file.config, params, *cases.inputs())
    np.testing.assert_allclose(logits, stored_logits(case), atol=1e-4, rtol=0)


def test_llama3_scaling_is_read_from_the_tensor_of_factors(tmp_path: Path) -> None:
    config = parse_config(cases.CASES["llama llama3"])
    plain = inverse_frequencies(RopeConfig(theta=config.rope.theta), config.head_dim)
    factors = plain / inverse_frequencies(config.rope, config.head_dim)
    path, _ = write_case(tmp_path, "llama llama3", extra={"rope_freqs.weight": factors.astype(np.float32)})
    file = GGUFFile(path)
    assert file.config.rope.kind == "factors"
    params = assemble(file.config, file.tensors(), np.float32)
    logits = apply(file.config, params, *cases.inputs())
    np.testing.assert_allclose(logits, stored_logits("llama llama3"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_matrices_of_every_writable_type_are_dequantised(tmp_path: Path, kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    config = dataclasses.replace(parse_config(cases.CASES["llama"]), intermediate_size=64)
    shape = (64, 32)  # rows of whole blocks
    tensors = {**case_tensors("llama")}
    for layer in range(2):
        for name in ("gate_proj", "up_proj"):
            tensors[f"model.layers.{layer}.mlp.{name}.weight"] = cases.weight(name, shape)
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = cases.weight("down_proj", shape[::-1])
    path = write_gguf(tmp_path / "model.gguf", config, tensors, kind=quantisation)
    file = GGUFFile(path)
    params = assemble(file.config, file.tensors(), np.float32)
    expected = gguf.dequantize(gguf.quantize(cases.weight("up_proj", shape), quantisation), quantisation)
    np.testing.assert_array_equal(params["layers"][1]["mlp"]["up_proj"]["kernel"], expected.T)
    # q's rows were quantised in GGUF's order, each by itself, and are back in ours.
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = gguf.dequantize(gguf.quantize(tensors[name], quantisation), quantisation)
    np.testing.assert_array_equal(params["layers"][0]["self_attn"]["q_proj"]["kernel"], expected.T)


def test_numbers_are_the_short_decimals_that_were_meant(tmp_path: Path) -> None:
    path, _ = write_case(tmp_path, "llama", metadata={"attention.layer_norm_rms_epsilon": 1e-5})
    assert GGUFFile(path).config.rms_norm_eps == 1e-5


def test_end_of_turn_is_an_end_token_too(tmp_path: Path) -> None:
    path, _ = write_case(tmp_path, "llama", metadata={".tokenizer.ggml.eot_token_id": 5})
    assert GGUFFile(path).config.eos_token_ids == (2, 5)


def test_missing_unknown_misshapen_and_undequantisable_tensors_are_all_listed(tmp_path: Path) -> None:
    config, tensors = parse_config(cases.CASES["llama"]), case_tensors("llama")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((47, 32), np.float32)
    tensors["blk.0.attn_sinks.weight"] = np.zeros(4, np.float32)
    extra = {"blk.1.ffn_up.weight": np.zeros((48, 32), np.int32)}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "model.gguf", config, tensors, extra=extra)
    with pytest.raises(ModelLoadError, match="4 faults") as caught:
        load_model(path)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "missing: model.norm.weight (32,)",
        "unknown: blk.0.attn_sinks.weight (4,)",
        "wrong shape: model.layers.0.mlp.up_proj.weight is (47, 32), expected (48, 32)",
        "stored as I32, which can't be read: model.layers.1.mlp.up_proj.weight",
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"leave_out": ("block_count", "embedding_length")},
            "llama.embedding_length is missing\n.*block_count",
        ),
        ({"metadata": {"rope.scaling.type": "longrope"}}, "'longrope'"),
        ({"metadata": {"rope.dimension_count": 4}}, "rope.dimension_count=4"),
        ({"metadata": {"attention.value_length": 4}}, "value_length"),
        ({"metadata": {"expert_count": 8}}, "expert_count=8"),
        ({"metadata": {".split.count": 3}}, "split"),
        ({"metadata": {**YARN, "rope.scaling.yarn_ext_factor": 0.0}}, "yarn_ext_factor"),
        ({"metadata": {"attention.head_count": [4, 2]}}, "attention.head_count"),
        ({"extra": {"rope_freqs.weight": np.ones(3, np.float32)}}, "rope_freqs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    path, _ = write_case(tmp_path, "llama", **options)
    with pytest.raises(ModelLoadError, match=named):
        load_model(path)


def test_unknown_architectures_and_foreign_files_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"'mamba'.*llama, qwen2"):
        load_model(tmp_path / "mamba.gguf")
    (tmp_path / "text.gguf").write_bytes(b"not a model, though its name says so")
    with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
        load_model(tmp_path / "text.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
        load_model(tmp_path / "empty.gguf")
