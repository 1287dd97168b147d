"""A tokenizer rebuilt from the metadata of a GGUF file.

Two values of tokenizer.ggml.model are known: "gpt2", byte-level BPE with given merges, and "llama",
SentencePiece's BPE with a score for each piece. Anything else is refused by name: a wrong split would quietly
change every prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from rollout_spec.errors import ModelLoadError
from rollout_spec.models import ModelConfig
from rollout_spec.tokenizer import Tokenizer

Metadata = Callable[..., Any]
"""metadata(key, default=None) -> value of a GGUF field."""

# Token types of the format.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Words with contractions, digits in groups of at most {digits}, punctuation, line breaks, other space: the
# pattern of tiktoken's cl100k, in the form that Llama 3 (3 digits) and Qwen2 (1 digit) publish.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SAME_SPLIT = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's sign for a space


def build_tokenizer(metadata: Metadata, config: ModelConfig) -> Tokenizer:
    """The tokenizer that the fields `tokenizer.*` describe.

    Raises ModelLoadError if there is none, or for a model or pre-tokenizer that isn't known.
    """
    tokens: list[str] | None = metadata("tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelLoadError("the GGUF file holds no tokenizer (field tokenizer.ggml.tokens)")
    types = metadata("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    model = metadata("tokenizer.ggml.model")
    if model == "gpt2":
        backend = _byte_level_bpe(metadata, tokens, config.architecture)
        starts_by_default = _split_kind(metadata) == "llama-bpe"
    elif model == "llama":
        backend = _sentencepiece_bpe(metadata, tokens, types)
        starts_by_default = True
    else:
        raise ModelLoadError(
            f"tokenizer.ggml.model={model!r}: supported are gpt2 (byte-level BPE) and llama "
            "(SentencePiece's BPE)"
        )

    backend.add_special_tokens(_added(tokens, types, (_CONTROL, _UNKNOWN), special=True))
    backend.add_tokens(_added(tokens, types, (_USER_DEFINED,), special=False))
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    identifiers = {name: metadata(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    special_tokens = {name: tokens[index] for name, index in identifiers.items() if index is not None}
    before = metadata("tokenizer.ggml.add_bos_token", starts_by_default) and special_tokens.get("bos_token")
    after = metadata("tokenizer.ggml.add_eos_token", False) and special_tokens.get("eos_token")
    _surround(backend, before or None, after or None)
    return Tokenizer(
        backend,
        chat_template=metadata("tokenizer.chat_template"),
        special_tokens=special_tokens,
        eos_token_ids=config.eos_token_ids,
    )


def _split_kind(metadata: Metadata) -> str:
    kind: str = metadata("tokenizer.ggml.pre", "default")
    return _SAME_SPLIT.get(kind, kind)


def _byte_level_bpe(metadata: Metadata, tokens: list[str], architecture: str) -> Backend:
    kind = _split_kind(metadata)
    if kind == "default" and architecture == "qwen2":
        kind = "qwen2"  # files from before the field was introduced
    merges = [tuple(merge.split(" ")) for merge in metadata("tokenizer.ggml.merges") or []]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        backend = Backend(models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe"))
    except Exception as error:  # tokenizers raises nothing more special
        raise ModelLoadError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    backend.decoder = decoders.ByteLevel()
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's own pattern
    if kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    elif kind in ("default", "gpt-2"):
        backend.pre_tokenizer = plain
    elif kind in ("llama-bpe", "qwen2"):
        words = Regex(_WORDS.format(digits="{1,3}" if kind == "llama-bpe" else ""))
        split = pre_tokenizers.Split(words, behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
        if kind == "qwen2":
            backend.normalizer = normalizers.NFC()
    else:
        raise ModelLoadError(
            f"tokenizer.ggml.pre={kind!r}: supported are smollm, llama-bpe, qwen2, gpt-2 and default"
        )
    return backend


def _sentencepiece_bpe(metadata: Metadata, tokens: list[str], types: list[int]) -> Backend:
    """SentencePiece joins the neighbours whose union scores best: BPE whose merges rank by score."""
    if metadata("tokenizer.ggml.precompiled_charsmap") is not None:
        raise ModelLoadError(
            "tokenizer.ggml.precompiled_charsmap: SentencePiece's own normalisers aren't supported"
        )
    scores = metadata("tokenizer.ggml.scores")
    if scores is None:
        raise ModelLoadError("the GGUF file's SentencePiece tokenizer has no scores (tokenizer.ggml.scores)")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    ranked = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind != _NORMAL:
            continue
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        ranked += [(-score, pair) for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
    ranked.sort(key=lambda entry: entry[0])  # stable: splits of one piece stay in order
    unknown = metadata("tokenizer.ggml.unknown_token_id")
    backend = Backend(
        models.BPE(
            vocabulary,
            [pair for _, pair in ranked],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    starts_with_space = metadata("tokenizer.ggml.add_space_prefix", True)
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    text: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if starts_with_space:
        spaces.insert(0, normalizers.Prepend(_SPACE))
        text.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(text)
    return backend


def _added(tokens: list[str], types: list[int], kinds: tuple[int, ...], *, special: bool) -> list[AddedToken]:
    """Tokens that are found in the text before anything is split."""
    pairs: Iterable[tuple[str, int]] = zip(tokens, types, strict=True)
    return [AddedToken(token, special=special, normalized=False) for token, kind in pairs if kind in kinds]


def _surround(backend: Backend, before: str | None, after: str | None) -> None:
    """Put start or end tokens around every text, if the model was trained so (Llama; not SmolLM2, Qwen2)."""
    around = [token for token in (before, after) if token is not None]
    if not around:
        return
    single = [*([before] if before else []), "$A", *([after] if after else [])]
    second = [part.replace("$A", "$B") + ":1" for part in single]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *second],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(around)],
    )
