"""Live comparison with transformers and torch, and that what is stored is what they give today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="compares live with torch and transformers: run `make test-torch`"
)
transformers = pytest.importorskip(
    "transformers", reason="compares live with transformers: run `make test-torch`"
)

from rollout_spec.loading import load_model  # noqa: E402
from rollout_spec.loading.gguf_tokenizer import build_tokenizer  # noqa: E402
from rollout_spec.models import apply  # noqa: E402
from tests.references import cases, plain_tokenizers  # noqa: E402
from tests.references.models_of_transformers import build_model, load_smollm2, model_logits  # noqa: E402
from tests.rollout_spec.loading.checkpoints import open_gguf, stored_logits  # noqa: E402

pytestmark = pytest.mark.torch

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"


def random_config(seed: int) -> dict[str, Any]:
    """A random combination of every option."""
    generator = np.random.default_rng(seed)

    def pick(*options: Any) -> Any:
        return options[generator.integers(len(options))]

    raw = dict(pick(cases.CASES["llama"], cases.CASES["qwen2"]))
    heads, groups = pick(1, 2, 3), pick(1, 2, 4)
    raw |= {
        "num_attention_heads": heads * groups,
        "num_key_value_heads": heads,
        "hidden_size": heads * groups * pick(4, 6, 16),
        "intermediate_size": pick(8, 50),
        "num_hidden_layers": pick(1, 3),
        "vocab_size": pick(17, 300),
        "rms_norm_eps": pick(1e-6, 1e-5, 1e-2),
        "rope_theta": pick(500.0, 10_000.0, 1e6),
        "tie_word_embeddings": pick(True, False),
        "head_dim": pick(None, 8, 20),
    }
    if raw["model_type"] == "llama":
        raw |= {"attention_bias": pick(True, False), "mlp_bias": pick(True, False)}
    scaled = [case for case in cases.CASES.values() if case.get("rope_scaling")]
    raw["rope_scaling"] = pick(None, *(case["rope_scaling"] for case in scaled))
    return {key: value for key, value in raw.items() if value is not None}


@pytest.mark.parametrize("case", cases.CASES)
def test_stored_logits_are_those_of_this_transformers(case: str) -> None:
    raw = cases.CASES[case]
    logits = model_logits(build_model(raw), *cases.inputs(raw["vocab_size"]))
    np.testing.assert_allclose(logits, stored_logits(case), atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_random_models_saved_by_transformers_load_with_its_logits(tmp_path: Path, seed: int) -> None:
    raw = random_config(seed)
    model = build_model(raw)
    model.save_pretrained(tmp_path, max_shard_size="1KB" if seed % 2 else "1GB")
    assert (tmp_path / "model.safetensors").exists() == (seed % 2 == 0)
    loaded = load_model(tmp_path, jnp.float32)
    token_ids, positions = cases.inputs(raw["vocab_size"])
    logits = apply(loaded.config, loaded.params, token_ids, positions)
    np.testing.assert_allclose(logits, model_logits(model, token_ids, positions), atol=1e-4, rtol=0)


@pytest.mark.model
def test_smollm2_has_transformers_logits_over_the_whole_vocabulary(smollm2_path: Path) -> None:
    """To 1e-4 relative to the largest logit; why not absolutely, says the test of the stored results."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    loaded = load_model(smollm2_path, jnp.float32)
    assert loaded.tokenizer is not None
    token_ids = np.array([loaded.tokenizer.encode(cases.SMOLLM2_TEXT)], dtype=np.int32)
    expected = model_logits(load_smollm2(smollm2_path), token_ids)
    difference = np.abs(apply(loaded.config, loaded.params, token_ids) - expected)
    assert np.quantile(difference, 0.999) < 1e-4
    assert difference.max() < 3e-4


@pytest.mark.model
def test_chat_template_and_tokenizer_of_a_saved_folder_agree(tmp_path: Path, smollm2_path: Path) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=open_gguf(smollm2_path).tokenizer().backend, eos_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    build_model({**cases.CASES["llama"], "vocab_size": 49_152}).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ours = load_model(tmp_path).tokenizer
    assert ours is not None
    for messages in cases.CHATS:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(messages) == text
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.apply_chat_template(messages) == ids
    for text in cases.TRICKY_TEXTS:
        assert ours.encode(text) == tokenizer(text)["input_ids"]
        ids = ours.encode(text)
        plain = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == plain


@pytest.mark.model
def test_qwen2_split_is_that_of_transformers(smollm2_path: Path) -> None:
    metadata = open_gguf(smollm2_path).metadata
    tokens, merges = metadata("tokenizer.ggml.tokens"), metadata("tokenizer.ggml.merges")
    theirs = transformers.Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
    )
    ours = build_tokenizer(
        lambda key, default=None: "qwen2" if key == "tokenizer.ggml.pre" else metadata(key, default),
        open_gguf(smollm2_path).config,
    )
    for text in cases.TRICKY_TEXTS:
        if not any(token in text for token in tokens[:17]):  # which theirs doesn't know as special
            assert ours.encode(text) == theirs(text)["input_ids"], text


@pytest.mark.model
def test_llama3_split_is_that_of_transformers(smollm2_path: Path) -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    assert TikTokenConverter(vocab_file="unused").pattern == plain_tokenizers.LLAMA3_PATTERN


@pytest.mark.model
def test_stored_token_ids_are_those_of_the_plain_tokenizers(smollm2_path: Path) -> None:
    stored = json.loads(Path(cases.__file__).with_name("tokenizers.json").read_text())
    for kind in ("smollm", "gpt-2", "llama-bpe", "qwen2"):
        plain = plain_tokenizers.smollm2(smollm2_path, kind)
        assert [plain.encode(text) for text in cases.TRICKY_TEXTS] == stored[kind]
