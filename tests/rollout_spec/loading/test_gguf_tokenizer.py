"""Tokenizers rebuilt from GGUF metadata give the ids of independent implementations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_spec.errors import ModelLoadError
from rollout_spec.loading.gguf_tokenizer import build_tokenizer
from rollout_spec.models import ModelConfig
from rollout_spec.tokenizer import Tokenizer
from tests.references import cases
from tests.rollout_spec.loading.checkpoints import open_gguf

STORED: dict[str, Any] = json.loads(Path(cases.__file__).with_name("tokenizers.json").read_text())
CONFIG = ModelConfig("llama", 8, 8, 8, 1, 1, 1, 8, 64, eos_token_ids=(2,))

Metadata = Callable[..., Any]


@pytest.fixture(scope="module")
def metadata_of_smollm2(smollm2_path: Path) -> Metadata:
    return open_gguf(smollm2_path).metadata


def changed(metadata: Metadata, **fields: Any) -> Metadata:
    """The metadata with other values of tokenizer.ggml.* fields."""
    return lambda key, default=None: fields.get(key.removeprefix("tokenizer.ggml."), metadata(key, default))


def sentencepiece_metadata(**fields: Any) -> Metadata:
    stored = STORED["sentencepiece"]
    values = {
        "model": "llama",
        "tokens": stored["tokens"],
        "scores": stored["scores"],
        "token_type": stored["types"],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }
    return lambda key, default=None: values.get(key.removeprefix("tokenizer.ggml."), default)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_splits_give_the_stored_ids(metadata_of_smollm2: Metadata, kind: str) -> None:
    tokenizer = build_tokenizer(changed(metadata_of_smollm2, pre=kind, add_bos_token=False), CONFIG)
    for text, expected in zip(cases.TRICKY_TEXTS, STORED[kind], strict=True):
        assert tokenizer.encode(text) == expected, text


@pytest.mark.model
def test_the_splits_differ_on_the_texts(metadata_of_smollm2: Metadata) -> None:
    kinds = ("smollm", "gpt-2", "llama-bpe", "qwen2")
    assert len({json.dumps(STORED[kind]) for kind in kinds}) == len(kinds)


@pytest.mark.model
def test_chats_give_the_stored_ids(metadata_of_smollm2: Metadata) -> None:
    tokenizer = build_tokenizer(metadata_of_smollm2, CONFIG)
    for messages, expected in zip(cases.CHATS, STORED["chats"], strict=True):
        assert tokenizer.apply_chat_template(messages) == expected


@pytest.mark.model
def test_every_text_comes_back_unchanged(metadata_of_smollm2: Metadata) -> None:
    tokenizer = build_tokenizer(metadata_of_smollm2, CONFIG)
    for text in cases.TRICKY_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.model
def test_llama3_starts_texts_with_its_start_token_unless_told_otherwise(
    metadata_of_smollm2: Metadata,
) -> None:
    def first(**fields: Any) -> list[int]:
        return build_tokenizer(changed(metadata_of_smollm2, **fields), CONFIG).encode("a")[:-1]

    def without_flag(key: str, default: Any = None) -> Any:
        return default if key == "tokenizer.ggml.add_bos_token" else metadata_of_smollm2(key, default)

    assert first() == []
    assert first(add_bos_token=True) == [1]
    assert build_tokenizer(changed(without_flag, pre="llama-bpe"), CONFIG).encode("a")[:-1] == [1]
    assert build_tokenizer(without_flag, CONFIG).encode("a")[:-1] == []


@pytest.mark.model
def test_special_tokens_are_skipped_in_text_and_added_ones_are_not(metadata_of_smollm2: Metadata) -> None:
    types = metadata_of_smollm2("tokenizer.ggml.token_type")
    types[3] = 4  # <repo_name>, as if the user had defined it
    tokenizer = build_tokenizer(changed(metadata_of_smollm2, token_type=types), CONFIG)
    ids = tokenizer.encode("a<|im_end|><repo_name>")
    assert ids[1:] == [2, 3]
    assert tokenizer.decode(ids) == "a<repo_name>"


def test_sentencepiece_gives_the_ids_and_texts_of_sentencepiece() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata(add_bos_token=False), CONFIG)
    stored = STORED["sentencepiece"]
    for text, ids, decoded in zip(stored["texts"], stored["ids"], stored["decoded"], strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == decoded


def test_sentencepiece_puts_start_and_end_tokens_around_texts() -> None:
    inner = build_tokenizer(sentencepiece_metadata(add_bos_token=False), CONFIG).encode("the sea")
    assert build_tokenizer(sentencepiece_metadata(), CONFIG).encode("the sea") == [1, *inner]
    both = build_tokenizer(sentencepiece_metadata(add_eos_token=True), CONFIG)
    assert both.encode("the sea") == [1, *inner, 2]
    assert both.encode("the sea", add_special_tokens=False) == inner


def test_sentencepiece_without_the_space_in_front() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata(add_bos_token=False, add_space_prefix=False), CONFIG)
    pieces = [STORED["sentencepiece"]["tokens"][token] for token in tokenizer.encode("a b")]
    assert "".join(pieces) == "a\N{LOWER ONE EIGHTH BLOCK}b"
    assert tokenizer.decode(tokenizer.encode(" a b")) == " a b"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": "t5"}, r"tokenizer\.ggml\.model='t5'"),
        ({"model": "gpt2", "pre": "tekken"}, r"tokenizer\.ggml\.pre='tekken'"),
        ({"tokens": None}, "holds no tokenizer"),
        ({"scores": None}, "no scores"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap"),
        ({"model": "gpt2", "merges": ["not there"]}, "merges"),
    ],
)
def test_unknown_tokenizers_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        build_tokenizer(sentencepiece_metadata(**fields), CONFIG)


def test_special_tokens_and_end_tokens_are_passed_on() -> None:
    tokenizer: Tokenizer = build_tokenizer(sentencepiece_metadata(), CONFIG)
    assert tokenizer.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == len(STORED["sentencepiece"]["tokens"])
