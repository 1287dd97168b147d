"""The policy's tokens: one a character."""

from __future__ import annotations

import string

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rollout_spec.tokenizer import Tokenizer

END = "<end>"
TOKENS = (END, "\n", "+", "*", "=", *string.digits, *string.ascii_lowercase, *"ABCDEFGHIJ")
END_ID = TOKENS.index(END)
VOCABULARY_SIZE = 64
"""A little larger than there are tokens, for the sake of round sizes."""

_IDS = {token: index for index, token in enumerate(TOKENS)}


def encode(text: str) -> list[int]:
    """Token ids; KeyError for a character outside the alphabet. Faster than the tokenizer, and the same."""
    return [_IDS[character] for character in text]


def make_tokenizer() -> Tokenizer:
    """The same as a tokenizer of the engine."""
    backend = Backend(models.WordLevel(_IDS, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(END, special=True)])
    return Tokenizer(backend, eos_token_ids=(END_ID,))
