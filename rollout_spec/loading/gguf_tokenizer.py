"""A tokenizer rebuilt from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from rollout_spec.errors import ModelLoadError
from rollout_spec.models import ModelConfig
from rollout_spec.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # token types of the format, beside 1 normal, 2 unknown, 5 unused, 6 byte

# Words with contractions, digits in groups of at most {digits}, punctuation, line breaks, other space: the
# pattern of tiktoken's cl100k, in the form that Llama 3 (3 digits) and Qwen2 (1 digit) publish.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Metadata = Callable[..., Any]
"""metadata(key, default=None) -> value of a GGUF field."""


def build_tokenizer(metadata: Metadata, config: ModelConfig) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` describes: byte-level BPE ("gpt2").

    Raises ModelLoadError for other models and for pre-tokenizers it doesn't know, by name: a wrong split would
    quietly change every prompt.
    """
    tokens: list[str] = metadata("tokenizer.ggml.tokens")
    model = metadata("tokenizer.ggml.model")
    if tokens is None:
        raise ModelLoadError("the GGUF file holds no tokenizer (tokenizer.ggml.tokens)")
    if model != "gpt2":
        raise ModelLoadError(f"tokenizer.ggml.model={model!r}: supported is gpt2 (byte-level BPE)")
    backend = _byte_level_bpe(metadata, tokens, config.architecture)

    types = metadata("tokenizer.ggml.token_type") or [1] * len(tokens)
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _USER_DEFINED
        ]
    )
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": tokens[identifier]
        for name, key in names.items()
        if (identifier := metadata(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    _add_post_processor(backend, metadata, special)
    return Tokenizer(
        backend,
        chat_template=metadata("tokenizer.chat_template"),
        special_tokens=special,
        eos_token_ids=config.eos_token_ids,
    )


def _byte_level_bpe(metadata: Metadata, tokens: list[str], architecture: str) -> Backend:
    kind = metadata("tokenizer.ggml.pre", "default")
    if kind == "default" and architecture == "qwen2":
        kind = "qwen2"  # files from before the field was introduced
    merges = [tuple(merge.split(" ")) for merge in metadata("tokenizer.ggml.merges") or []]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe"))
    backend.decoder = decoders.ByteLevel()
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's own pattern
    if kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    elif kind in ("default", "gpt-2"):
        backend.pre_tokenizer = plain
    elif kind in ("llama-bpe", "qwen2"):
        words = Regex(_WORDS.format(digits="{1,3}" if kind == "llama-bpe" else ""))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(words, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if kind == "qwen2":
            backend.normalizer = normalizers.NFC()
    else:
        raise ModelLoadError(
            f"tokenizer.ggml.pre={kind!r}: supported are smollm, llama-bpe, qwen2, gpt-2, default"
        )
    return backend


def _add_post_processor(backend: Backend, metadata: Metadata, special: dict[str, str]) -> None:
    """Put the start token before every text if the model was trained so (Llama 3; not SmolLM2 or Qwen2)."""
    starts_by_default = metadata("tokenizer.ggml.pre") == "llama-bpe"
    if metadata("tokenizer.ggml.add_bos_token", starts_by_default) and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
