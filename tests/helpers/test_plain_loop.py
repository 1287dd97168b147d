"""The plain loop on a scripted model: where completions end, and which tokens they hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.helpers.plain_loop import certain_prefix, first_stop_string, plain_generate, plain_samples
from tests.helpers.plain_noise import derive_seed
from tests.helpers.plain_sampler import Float64Array


class CountingModel:
    """Prefers the token after the last one, then the one after that, and so on, in a circle of ten."""

    eos_token_ids = (9,)
    max_length = 30

    def last_logits(self, token_ids: Sequence[int]) -> Float64Array:
        return -0.7 * ((np.arange(10) - token_ids[-1] - 1) % 10)


class LetterTokenizer:
    """Token 0 is a, 1 is b, ...; 9 is special."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join("abcdefghi|"[token] for token in token_ids if token != 9 or not skip_special_tokens)


GREEDY = {"temperature": 0.0}


@pytest.mark.parametrize(
    ("sampling", "tokens", "finish_reason", "stop_token"),
    [
        ({}, [3, 4, 5, 6, 7, 8, 9], "stop", 9),
        ({"max_tokens": 3}, [3, 4, 5], "length", None),
        ({"max_tokens": 7}, [3, 4, 5, 6, 7, 8, 9], "stop", 9),
        ({"stop_token_ids": [6]}, [3, 4, 5, 6], "stop", 6),
        ({"stop_token_ids": [4], "min_tokens": 2, "max_tokens": 4}, [3, 5, 6, 7], "length", None),
        ({"min_tokens": 7}, [3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "stop", 9),
        ({"ignore_eos": True, "max_tokens": 9}, [3, 4, 5, 6, 7, 8, 9, 0, 1], "length", None),
        ({"ignore_eos": True}, [*range(3, 10), *range(10), *range(10)], "length", None),
        ({"stop": "fg"}, [3, 4, 5, 6], "stop", "fg"),
        ({"stop": ["zz", "ef", "f"]}, [3, 4, 5], "stop", "ef"),
        ({"stop": ["d"], "min_tokens": 2, "max_tokens": 4}, [3, 4, 5, 6], "length", None),
        ({"bad_token_ids": [3, 4], "logit_bias": {6: 5.0}, "max_tokens": 2}, [6, 7], "length", None),
    ],
)
def test_completions_end_where_the_specification_says(
    sampling: dict[str, object], tokens: list[int], finish_reason: str, stop_token: int | str | None
) -> None:
    completion = plain_generate(
        CountingModel(), [0, 1, 2], {**GREEDY, **sampling}, seed=0, tokenizer=LetterTokenizer()
    )
    assert (completion.token_ids, completion.finish_reason, completion.stop_token) == (
        tokens,
        finish_reason,
        stop_token,
    )
    assert completion.text == "".join("abcdefghi"[token] for token in tokens if token != 9)


def test_stop_string_inside_a_token_cuts_the_text_right_after_it() -> None:
    assert first_stop_string("ab", "abcd", ["c"]) == ("c", 3)
    assert first_stop_string("ab", "abcd", ["b", "bc", "cd"]) == ("bc", 3)
    assert first_stop_string("ab", "abcd", ["bcd", "bc", "abcd"]) == ("abcd", 4)
    assert first_stop_string("a", "abbb", ["b"]) == ("b", 2)
    assert first_stop_string("ab", "abcd", ["ab"]) is None
    assert first_stop_string("a\ufffd", "aé", ["é"]) == ("é", 2)


def test_samples_have_derived_seeds_and_each_stands_alone() -> None:
    sampling = {"temperature": 1.5, "n": 4, "max_tokens": 12, "repetition_penalty": 1.3}
    samples = list(plain_samples(CountingModel(), [1], sampling, seed=11))
    assert [sample.seed for sample in samples] == [derive_seed(11, i) for i in range(4)]
    assert len({tuple(sample.token_ids) for sample in samples}) == 4
    alone = plain_generate(CountingModel(), [1], sampling, seed=samples[2].seed)
    assert alone == samples[2]


def test_only_narrow_margins_are_uncertain() -> None:
    completion = plain_generate(CountingModel(), [1], {"max_tokens": 8, "ignore_eos": True}, seed=2)
    assert certain_prefix(completion, 1e-5) == 8
    completion.margins[5] = 1e-6
    assert certain_prefix(completion, 1e-5) == 5
