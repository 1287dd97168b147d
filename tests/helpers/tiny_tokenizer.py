"""A real byte-level tokenizer of any small size; its tokens meet stop strings and cut characters in half."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rollout_spec.tokenizer import Tokenizer

# Byte-level alphabet: "Ġ" is a space; "Ã" and "©" are the two bytes of "é", each no character alone.
_LETTERS = ("a", "b", "c", "Ġ", "Ã", "©", "x")


def _pieces() -> Iterator[str]:
    for length in itertools.count(1):
        yield from map("".join, itertools.product(_LETTERS, repeat=length))


@functools.cache
def tiny_tokenizer(vocab_size: int, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """`vocab_size` tokens: the shortest strings over a few letters; those at eos_token_ids are special."""
    pieces = _pieces()
    vocabulary = {
        f"<|end{token}|>" if token in eos_token_ids else next(pieces): token for token in range(vocab_size)
    }
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(f"<|end{token}|>", special=True) for token in eos_token_ids])
    return Tokenizer(backend, eos_token_ids=eos_token_ids)
