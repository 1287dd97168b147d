"""Where a completion ends, token by token."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import pytest

from rollout_spec import SamplingParams
from rollout_spec.requests import Sequence
from rollout_spec.stopping import check_end, end
from tests.helpers.tiny_tokenizer import tiny_tokenizer
from tests.rollout_spec.sequences import CONFIG, append, intake

VOCABULARY, (END,) = 450, CONFIG.eos_token_ids
TOKENIZER = tiny_tokenizer(VOCABULARY, (END,))
PROMPT = [5, 6]
E_ACUTE = ("Ã", "©")  # the two bytes of "é", in the tokenizer's alphabet


def token_of(piece: str) -> int:
    token = TOKENIZER.backend.token_to_id(piece)
    assert token is not None, f"the test's vocabulary lacks {piece!r}"
    return token


def generate(pieces: SequenceOf[str | int], tokenizer: Any = TOKENIZER, **sampling: Any) -> Sequence:
    """Appends pieces (or token ids) until the sequence ends; ends it as aborted if none of them does."""
    params = SamplingParams(**{"seed": 0, "max_tokens": 300, **sampling})
    request = intake(TOKENIZER, vocab_size=VOCABULARY).request(PROMPT, params, request_id=0)
    (sequence,) = request.sequences
    for piece in pieces:
        append(sequence, [token_of(piece) if isinstance(piece, str) else piece])
        if check_end(sequence, tokenizer):
            return sequence
    end(sequence, tokenizer, "abort", None)
    return sequence


def ended(sequence: Sequence) -> tuple[int, str | None, int | str | None, str | None]:
    return sequence.num_generated, sequence.finish_reason, sequence.stop_token, sequence.text


# Stop tokens and lengths


def test_the_models_end_token_ends_and_is_kept_but_not_in_the_text() -> None:
    assert ended(generate(["a", "b", END, "c"])) == (3, "stop", END, "ab")
    assert ended(generate(["a", END, "b"], ignore_eos=True)) == (3, "abort", None, "ab")


def test_stop_token_ids_end_and_are_in_the_text() -> None:
    stop = token_of("bc")
    assert ended(generate(["a", "bc", "a"], stop_token_ids=[stop])) == (2, "stop", stop, "abc")
    assert ended(generate(["a", END], stop_token_ids=[stop])) == (2, "stop", END, "a")
    assert ended(generate(["bc", END], stop_token_ids=[END], ignore_eos=True)) == (2, "stop", END, "bc")


def test_a_stop_token_of_the_prompt_ends_nothing() -> None:
    assert ended(generate(["a"], stop_token_ids=PROMPT)) == (1, "abort", None, "a")


def test_the_length_limit_ends_and_a_stop_at_the_same_token_wins() -> None:
    assert ended(generate(["a", "b", "c"], max_tokens=2)) == (2, "length", None, "ab")
    assert ended(generate(["a", END], max_tokens=2)) == (2, "stop", END, "a")
    assert ended(generate(["a", "bc"], max_tokens=2, stop="b")) == (2, "stop", "b", "ab")


def test_no_end_before_min_tokens() -> None:
    """The sampler bans stop tokens that early; stop strings may complete unnoticed."""
    assert ended(generate(["a", "a", END], min_tokens=2)) == (3, "stop", END, "aa")
    assert ended(generate(["a", END, "a", END], min_tokens=2)) == (4, "stop", END, "aa")
    assert ended(generate(["b", "a", "b", "a"], min_tokens=2, stop="b")) == (3, "stop", "b", "bab")
    assert ended(generate(["a", "b", "a"], min_tokens=2, stop="b")) == (2, "stop", "b", "ab")
    assert ended(generate(["ab", "a", "a"], min_tokens=2, stop="b")) == (3, "abort", None, "abaa")


def test_without_tokenizer_there_is_no_text() -> None:
    assert ended(generate(["a", END], tokenizer=None)) == (2, "stop", END, None)


# Stop strings


@pytest.mark.parametrize(
    ("pieces", "stop", "tokens", "text"),
    [
        (["a", "b", "c"], "b", 2, "ab"),
        (["a", "b", "c", "a"], "abc", 3, "abc"),  # over three tokens
        (["x", "ab", "ca", "b"], "bc", 3, "xabc"),  # over two, with a rest that is cut off
        (["a", "abc", "b"], "b", 2, "aab"),  # within one
        (["ab", "ab", "ac"], "abac", 3, "ababac"),  # after a false start
        (["a", "a", "b"], "aab", 3, "aab"),
        (["Ġ", "ĠĠ"], " ", 1, " "),
        (["a", "ĠĠ"], " ", 2, "a "),  # twice in one token: the first counts
        (["aĠb", "b"], "a b", 1, "a b"),
        (["c", "b"], "abc", 2, None),
    ],
)
def test_a_stop_string_ends_at_the_token_that_completes_it(
    pieces: list[str], stop: str, tokens: int, text: str | None
) -> None:
    sequence = generate(pieces, stop=stop)
    if text is None:
        assert sequence.finish_reason == "abort"
    else:
        assert ended(sequence) == (tokens, "stop", stop, text)


def test_of_several_strings_the_one_that_begins_first_is_named() -> None:
    assert ended(generate(["x", "abc"], stop=["c", "bc"]))[2:] == ("bc", "xabc")
    assert ended(generate(["x", "abc"], stop=["c", "b"]))[2:] == ("b", "xab")
    assert ended(generate(["x", "abc"], stop=["bc", "b"]))[2:] == ("b", "xab")
    assert ended(generate(["a", "b", "c"], stop=["abc", "bc", "c"]))[2:] == ("abc", "abc")
    assert ended(generate(["a", "x"], stop=["b", "x"]))[2:] == ("x", "ax")


def test_a_stop_token_wins_over_a_string_at_the_same_token() -> None:
    stop = token_of("b")
    assert ended(generate(["a", "b"], stop="b", stop_token_ids=[stop])) == (2, "stop", stop, "ab")


def test_strings_of_characters_that_are_split_over_tokens() -> None:
    assert ended(generate(["a", *E_ACUTE, "b"], stop="é")) == (3, "stop", "é", "aé")
    assert ended(generate(["a", *E_ACUTE, "b", "c"], stop="aéb")) == (4, "stop", "aéb", "aéb")
    assert ended(generate(["Ã", "©a", "b"], stop="é")) == (2, "stop", "é", "é")
    assert ended(generate(["bÃ", "©b"], stop="éb")) == (2, "stop", "éb", "béb")


def test_half_characters_complete_nothing_and_hide_nothing() -> None:
    assert ended(generate(["b", "Ã", "b"], stop="é"))[1] == "abort"
    assert ended(generate(["Ã", "b", "a"], stop="b")) == (2, "stop", "b", "\ufffdb")
    assert ended(generate(["©", "©", "ab"], stop="ab")) == (3, "stop", "ab", "\ufffd\ufffdab")
    # With min_tokens, a string completed too early must not be found again when the character is completed.
    assert ended(generate(["b", "Ã", "©", "b"], stop="b", min_tokens=2)) == (4, "stop", "b", "béb")


def test_special_tokens_are_not_in_the_text_that_is_searched() -> None:
    assert ended(generate(["a", END, "b"], stop="ab", ignore_eos=True)) == (3, "stop", "ab", "ab")
    assert ended(generate(["a", END, END], stop="end", ignore_eos=True))[1] == "abort"


def test_a_stop_string_of_the_prompt_ends_nothing() -> None:
    text = TOKENIZER.decode(PROMPT)
    assert text
    assert ended(generate(["x", "x"], stop=text))[1] == "abort"


def test_long_completions_end_as_short_ones_do() -> None:
    """The search looks at the last tokens only; the text is cut at the right place all the same."""
    filler = ["a", "c", *E_ACUTE, "Ġ"] * 56
    text = "acé " * 56
    assert ended(generate([*filler, "x", "bx", "a"], stop="xb")) == (282, "stop", "xb", text + "xb")
    assert ended(generate([*filler, "ab"], stop="b")) == (281, "stop", "b", text + "ab")


@pytest.mark.parametrize("seed", range(40))
def test_random_texts_end_where_searching_the_whole_text_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pieces = [int(token) for token in rng.integers(0, VOCABULARY, 40)]
    letters = list("abcx é")
    stops = ["".join(rng.choice(letters, int(rng.integers(1, 4)))) for _ in range(int(rng.integers(1, 4)))]
    sequence = generate(pieces, stop=stops, ignore_eos=True)
    # A string is complete at the first token after which it is in the text, once its characters are.
    for count in range(1, len(pieces) + 1):
        text = TOKENIZER.decode(pieces[:count])
        found = [(text.index(string), string) for string in stops if string in text]
        if found:
            at, string = min(found)
            assert ended(sequence) == (count, "stop", string, text[: at + len(string)])
            return
    assert sequence.finish_reason == "abort"
