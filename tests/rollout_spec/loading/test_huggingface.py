"""Loading Hugging Face folders: files, types, tokenizers, and errors that list every fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rollout_spec.errors import ModelLoadError, PromptError
from rollout_spec.loading import load_model
from rollout_spec.models import apply
from tests.references.cases import CASES, inputs
from tests.rollout_spec.loading.checkpoints import case_tensors, stored_logits, write_folder


def load_case(folder: Path, case: str, **options: Any) -> Any:
    return load_model(write_folder(folder, CASES[case], case_tensors(case), **options))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("case", ["llama attention bias", "qwen2 tied"])
def test_folders_of_one_and_of_many_files_give_transformers_logits(
    tmp_path: Path, case: str, shards: int
) -> None:
    loaded = load_case(tmp_path, case, shards=shards)
    assert loaded.tokenizer is None
    logits = apply(loaded.config, loaded.params, *inputs())
    np.testing.assert_allclose(logits, stored_logits(case), atol=1e-4, rtol=0)


@pytest.mark.parametrize("stored_as", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_float_types_are_converted(tmp_path: Path, stored_as: Any) -> None:
    tensors = {name: array.astype(stored_as) for name, array in case_tensors("llama").items()}
    loaded = load_model(write_folder(tmp_path, CASES["llama"], tensors))
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype(jnp.float32)}
    kernel = loaded.params["layers"][1]["mlp"]["down_proj"]["kernel"]
    np.testing.assert_array_equal(kernel, tensors["model.layers.1.mlp.down_proj.weight"].astype(np.float32).T)


def test_the_dtype_asked_for_is_given(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CASES["llama"], case_tensors("llama"))
    params = load_model(folder, jnp.bfloat16).params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_missing_unknown_and_misshapen_weights_are_all_listed(tmp_path: Path) -> None:
    tensors = case_tensors("llama")
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((32, 48), np.float32)
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((16, 32), np.int8)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    with pytest.raises(ModelLoadError, match="5 faults") as caught:
        load_model(write_folder(tmp_path, CASES["llama"], tensors))
    faults = str(caught.value).splitlines()[1:]
    assert [fault.strip() for fault in faults] == [
        "missing: lm_head.weight (64, 32)",
        "missing: model.norm.weight (32,)",
        "unknown: model.layers.2.mlp.up_proj.weight (48, 32)",
        "wrong shape: model.layers.0.mlp.up_proj.weight is (32, 48), expected (48, 32)",
        "stored as I8, which can't be read: model.layers.1.self_attn.k_proj.weight",
    ]


def test_a_tied_model_ignores_a_copy_of_its_head(tmp_path: Path) -> None:
    tensors = case_tensors("llama tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    loaded = load_model(write_folder(tmp_path, CASES["llama tied"], tensors))
    assert "lm_head" not in loaded.params


def test_shards_that_are_absent_or_incomplete_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CASES["llama"], case_tensors("llama"), shards=3)
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    index_file.write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"model\.extra\.weight \(said to be in model-00001"):
        load_model(folder)
    for shard in (1, 3):
        (folder / f"model-{shard:05}-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00003\.safetensors, model-00003-of"):
        load_model(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
        (lambda folder: (folder / "config.json").write_text("{,}"), "not valid JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"neither model\.safetensors nor"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"cut"), "not a readable safetensors"),
    ],
)
def test_broken_folders_are_refused_with_the_reason(tmp_path: Path, spoil: Any, message: str) -> None:
    folder = write_folder(tmp_path, CASES["llama"], case_tensors("llama"))
    spoil(folder)
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder)


def test_paths_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"neither a folder nor a \.gguf file"):
        load_model(tmp_path / "model.bin")


def test_a_folder_of_gguf_files_is_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"it holds small\.gguf: give the path of that file"):
        load_model(tmp_path)


def test_end_tokens_of_generation_config_come_first(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CASES["llama"], case_tensors("llama"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_model(folder).config.eos_token_ids == (5, 6)
    (folder / "generation_config.json").write_text("{}")
    assert load_model(folder).config.eos_token_ids == (2,)


@pytest.fixture
def folder_with_tokenizer(tmp_path: Path) -> Path:
    folder = write_folder(tmp_path, CASES["llama"], case_tensors("llama"))
    backend = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate("abcdeG")}, []))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def write_settings(folder: Path, **settings: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_the_tokenizer_neither_truncates_nor_pads(folder_with_tokenizer: Path) -> None:
    tokenizer = load_model(folder_with_tokenizer).tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("<s>abcde</s>") == [6, 0, 1, 2, 3, 4, 7]
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (8, (2,))


def test_a_folder_without_template_refuses_chats_with_the_remedy(folder_with_tokenizer: Path) -> None:
    tokenizer = load_model(folder_with_tokenizer).tokenizer
    assert tokenizer is not None
    with pytest.raises(PromptError, match="hold none: give the prompt as text"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("place", ["string", "list", "file"])
def test_chat_templates_are_found_wherever_they_are_kept(folder_with_tokenizer: Path, place: str) -> None:
    template = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    named = [{"name": "tool_use", "template": "c"}, {"name": "default", "template": template}]
    kept = {"string": template, "list": named, "file": "ignored when there is a file"}[place]
    tokens = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "pad_token": None}
    write_settings(folder_with_tokenizer, chat_template=kept, **tokens)
    if place == "file":
        (folder_with_tokenizer / "chat_template.jinja").write_text(template)
    tokenizer = load_model(folder_with_tokenizer).tokenizer
    assert tokenizer is not None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]) == [6, 0, 1, 7]
