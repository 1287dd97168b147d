"""Byte-level BPE in plain Python, and ChatML by hand: what the tokenizers are compared with.

Needs the `regex` package, which comes with transformers.
"""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import gguf
import regex

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Published with GPT-2: https://github.com/openai/gpt-2/blob/master/src/encoder.py"""

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Published with Llama 3: https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py"""

QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
"""Published with Qwen2, in its tokenizer.json."""


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in GPT-2's vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


class ByteLevelBPE:
    """Splits text at special tokens, then by each pattern in turn, then merges bytes by rank."""

    def __init__(
        self,
        tokens: list[str],
        merges: Iterable[str],
        special: set[str],
        patterns: tuple[str, ...],
        *,
        compose: bool = False,
        whole_words_first: bool = False,
    ) -> None:
        """compose: normalise to NFC. whole_words_first: a word that is a token needs no merges."""
        self.identifiers = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.special = special
        self.patterns = [regex.compile(pattern) for pattern in patterns]
        self.alphabet = byte_alphabet()
        self.compose = compose
        self.whole_words_first = whole_words_first

    def encode(self, text: str) -> list[int]:
        longest_first = sorted(self.special, key=len, reverse=True)
        pieces = regex.split("(" + "|".join(regex.escape(token) for token in longest_first) + ")", text)
        identifiers: list[int] = []
        for piece in pieces:
            if piece in self.special:
                identifiers.append(self.identifiers[piece])
            else:
                identifiers += [
                    self.identifiers[token] for word in self._words(piece) for token in self._merge(word)
                ]
        return identifiers

    def _words(self, text: str) -> list[str]:
        text = unicodedata.normalize("NFC", text) if self.compose else text
        words = [text] if text else []
        for pattern in self.patterns:  # matches and what lies between them are both words
            spans = [
                [0, *itertools.chain(*(m.span() for m in pattern.finditer(word))), len(word)]
                for word in words
            ]
            words = [
                word[start:end]
                for word, bounds in zip(words, spans, strict=True)
                for start, end in itertools.pairwise(bounds)
                if end > start
            ]
        return words

    def _merge(self, word: str) -> list[str]:
        symbols = [self.alphabet[byte] for byte in word.encode()]
        if self.whole_words_first and "".join(symbols) in self.identifiers:
            return ["".join(symbols)]
        while len(symbols) > 1:
            pairs = list(itertools.pairwise(symbols))
            best = min(range(len(pairs)), key=lambda i: (self.ranks.get(pairs[i], len(self.ranks)), i))
            if pairs[best] not in self.ranks:
                break
            symbols[best : best + 2] = ["".join(pairs[best])]
        return symbols


@functools.cache
def _vocabulary(path: Path) -> tuple[list[str], list[str]]:
    reader = gguf.GGUFReader(path)
    tokens, merges = (reader.get_field(f"tokenizer.ggml.{key}").contents() for key in ("tokens", "merges"))
    return tokens, merges


def smollm2(path: Path, kind: str = "smollm") -> ByteLevelBPE:
    """SmolLM2's vocabulary, whose first 17 tokens are special, with the rules of one of four families.

    kind: as in the GGUF field tokenizer.ggml.pre. SmolLM2's own splits off digits, then goes by GPT-2's.
    """
    tokens, merges = _vocabulary(path)
    patterns = {
        "smollm": (r"\p{N}", GPT2_PATTERN),
        "gpt-2": (GPT2_PATTERN,),
        "llama-bpe": (LLAMA3_PATTERN,),
        "qwen2": (QWEN2_PATTERN,),
    }
    return ByteLevelBPE(
        tokens,
        merges,
        set(tokens[:17]),
        patterns[kind],
        compose=kind == "qwen2",
        whole_words_first=kind == "llama-bpe",
    )


def chat_ml(messages: list[dict[str, str]]) -> str:
    """SmolLM2's chat format with its default system message, open for the assistant's turn."""
    if messages[0]["role"] != "system":
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        messages = [{"role": "system", "content": system}, *messages]
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"
