"""A token is a character, for the trainer's encoder and for the engine's tokenizer alike."""

from __future__ import annotations

import pytest

from examples.reasoner.alphabet import END_ID, TOKENS, VOCABULARY_SIZE, encode, make_tokenizer
from examples.reasoner.tasks import problems


def test_the_tokenizer_is_the_encoder() -> None:
    tokenizer = make_tokenizer()
    for problem in problems(20, seed=0):
        text = problem.prompt + problem.solution()
        ids = encode(text)
        assert len(ids) == len(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode([*ids, END_ID]) == text
    assert tokenizer.eos_token_ids == (END_ID,)


def test_every_token_has_an_id_of_the_vocabulary() -> None:
    assert len(set(TOKENS)) == len(TOKENS) <= VOCABULARY_SIZE
    with pytest.raises(KeyError):
        encode("?")
