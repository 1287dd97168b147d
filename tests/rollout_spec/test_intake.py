"""Whatever a caller hands in becomes token ids and sequences, or an error that says what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rollout_spec import Completion, DraftStats, RolloutError, SamplingParams
from rollout_spec.errors import CapacityError, ConfigError, PromptError
from rollout_spec.requests import Request
from rollout_spec.tokenizer import Tokenizer
from tests.helpers.tiny_tokenizer import tiny_tokenizer
from tests.rollout_spec.sequences import CONFIG, append, intake, new_sequence

TOKENIZER = tiny_tokenizer(CONFIG.vocab_size, CONFIG.eos_token_ids)
TEMPLATE = "{% for m in messages %}{{ m.content }}x{% endfor %}"


def request(
    prompt: Any, *, tokenizer: Any = None, continue_from: Any = None, group_id: Any = None, **sampling: Any
) -> Request:
    params = SamplingParams(**{"seed": 5, "max_tokens": 4, **sampling})
    return intake(tokenizer, max_seq_len=40, cache_tokens=36).request(
        prompt, params, request_id="r", continue_from=continue_from, group_id=group_id
    )


# Prompts


@pytest.mark.parametrize(
    "prompt",
    [
        [4, 5, 49],
        (4, 5, 49),
        np.array([4, 5, 49]),
        np.array([4, 5, 49], np.uint8),
        jnp.array([4, 5, 49]),
        [np.int64(4), np.int32(5), 49],
        range(4, 7),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_token_ids_of_every_kind(prompt: Any) -> None:
    ids = request(prompt).prompt_token_ids
    assert ids.dtype == np.int32
    assert ids.tolist() == [int(token) for token in prompt]


def test_texts_and_chats_go_through_the_tokenizer() -> None:
    assert request("ab", tokenizer=TOKENIZER).prompt_token_ids.tolist() == TOKENIZER.encode("ab")
    chatting = Tokenizer(TOKENIZER.backend, chat_template=TEMPLATE)
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert request(chat, tokenizer=chatting).prompt_token_ids.tolist() == TOKENIZER.encode("abxcx")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        (np.zeros(0, np.int32), "empty"),
        ([4, 50], r"outside the vocabulary of 50: \[50\]"),
        ([-1, 4], r"outside the vocabulary of 50: \[-1\]"),
        (np.array([2**40]), "outside the vocabulary"),
        ([1.5, 2.0], "float64"),
        ([True, False], "bool"),
        ([[4, 5], [6, 7]], r"shape \(2, 2\)"),
        ([[4, 5], [6]], "text, token ids or chat messages"),
        (["a", "b"], "integer token ids"),
        ([4, "a"], "integer token ids"),
        ([4, None], "integer token ids"),
        (b"abc", "text"),
        (7, "text, a flat sequence of integer token ids"),
        (7.5, "text"),
        (None, "text"),
        ({4, 5}, "text"),
        pytest.param(iter([4, 5]), "text", id="an iterator"),
        ({"role": "user", "content": "a"}, "list of messages"),
        ("ab", "no tokenizer"),
        ([{"role": "user", "content": "a"}], "no tokenizer"),
    ],
    ids=repr,
)
def test_prompts_that_can_not_be_run_say_why(prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        request(prompt)
    assert isinstance(raised.value, PromptError)
    assert isinstance(raised.value, RolloutError)
    assert "prompt" in str(raised.value)


def test_empty_texts_and_chats_without_a_template_are_refused() -> None:
    with pytest.raises(PromptError, match="empty"):
        request("", tokenizer=TOKENIZER)
    with pytest.raises(PromptError, match="chat template"):
        request([{"role": "user", "content": "a"}], tokenizer=TOKENIZER)


def test_prompts_must_leave_room_for_a_token() -> None:
    assert request([5] * 35, max_tokens=1).sequences[0].max_len == 36
    with pytest.raises(PromptError, match="40 tokens, but at most 39"):
        request([5] * 40)


def test_what_the_cache_can_never_hold_is_refused() -> None:
    with pytest.raises(MemoryError, match=r"37 tokens, but the cache holds 36.*kv_pages") as raised:
        request([5] * 33, max_tokens=4)
    assert isinstance(raised.value, CapacityError)


def test_the_prompt_is_copied() -> None:
    prompt = np.array([4, 5], np.int32)
    made = request(prompt)
    prompt[:] = 9
    assert made.prompt_token_ids.tolist() == [4, 5]
    assert made.sequences[0].tokens[:2].tolist() == [4, 5]


# Sampling


@pytest.mark.parametrize("name", ["bad_token_ids", "stop_token_ids", "logit_bias"])
def test_tokens_outside_the_vocabulary_are_named(name: str) -> None:
    inside, outside = (
        ({49: 1.0}, {49: 1.0, 50: 1.0, 77: 1.0}) if name == "logit_bias" else ([49], [77, 49, 50])
    )
    request([4], **{name: inside})
    with pytest.raises(ConfigError, match=rf"{name} .* 50: \[50, 77\]"):
        request([4], **{name: outside})


def test_something_must_be_left_to_sample() -> None:
    request([4], bad_token_ids=range(1, 50))
    with pytest.raises(ConfigError, match="leave no token"):
        request([4], bad_token_ids=range(50))
    banned = [token for token in range(50) if token not in (3, 7)]
    request([4], bad_token_ids=banned, stop_token_ids=[7], min_tokens=0)
    with pytest.raises(ConfigError, match="leave no token"):
        request([4], bad_token_ids=banned, stop_token_ids=[7], min_tokens=1)
    with pytest.raises(ConfigError, match="leave no token"):
        request([4], bad_token_ids=banned, stop_token_ids=[7, 3], min_tokens=1, ignore_eos=True)
    request([4], bad_token_ids=banned, stop_token_ids=[7], min_tokens=1, ignore_eos=True)


def test_stop_strings_need_a_tokenizer() -> None:
    request([4], stop="ab", tokenizer=TOKENIZER)
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        request([4], stop="ab")


def test_all_faults_of_sampling_are_listed() -> None:
    with pytest.raises(ConfigError) as raised:
        request([4], stop="ab", bad_token_ids=[60], logit_bias={70: 1.0})
    for part in ("stop strings", "60", "70"):
        assert part in str(raised.value)


def test_sampling_must_be_sampling_params() -> None:
    with pytest.raises(ConfigError, match="SamplingParams, got dict"):
        intake().request([4], {"temperature": 1.0}, request_id=0)  # type: ignore[arg-type]


# Sequences


def test_samples_have_derived_seeds_room_and_stop_tokens() -> None:
    made = request([4, 5, 6], n=3, max_tokens=7, stop_token_ids=[9])
    assert [sequence.sample for sequence in made.sequences] == [0, 1, 2]
    assert made.sequences[0].seed == 5
    assert len({sequence.seed for sequence in made.sequences}) == 3
    for sequence in made.sequences:
        assert (sequence.prompt_len, sequence.length, sequence.max_len, sequence.room) == (3, 3, 10, 7)
        assert sequence.stop_tokens == {3, 9}
    assert request([4], ignore_eos=True, stop_token_ids=[9]).sequences[0].stop_tokens == {9}
    assert request([5] * 30, max_tokens=4).sequences[0].max_len == 34


def test_the_models_length_limits_max_tokens() -> None:
    made = intake(max_seq_len=40).request([5] * 30, SamplingParams(max_tokens=10**9), request_id=0)
    assert made.sequences[0].room == 10


def test_seeds_not_given_are_drawn_from_the_engines() -> None:
    def drawn(seed: int) -> list[int]:
        source = intake(seed=seed)
        return [source.request([4], SamplingParams(), request_id=i).sequences[0].seed for i in range(4)]

    assert len(set(drawn(0))) == 4
    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert all(0 <= seed < 2**63 for seed in drawn(2))


def test_equal_prompts_are_a_group_unless_told_otherwise() -> None:
    assert request([4, 5]).group_id == request(np.array([4, 5])).group_id
    assert request([4, 5]).group_id != request([5, 4]).group_id
    assert request([4, 5], group_id="g").group_id == "g"


# Resuming


def partial(reason: Any, tokens: list[int], **fields: Any) -> Completion:
    sequence = new_sequence([4, 5], max_tokens=20, seed=77)
    append(sequence, tokens)
    sequence.finish_reason, sequence.text = reason, "some text"
    return dataclasses.replace(sequence.completion(), draft=DraftStats(3, 2, 1), **fields)


@pytest.mark.parametrize("reason", ["abort", "length"])
def test_a_partial_completion_goes_on_with_all_it_had(reason: str) -> None:
    before = partial(reason, [10, 11, 12])
    (sequence,) = request([4, 5], continue_from=before, max_tokens=9).sequences
    assert sequence.seed == 77
    assert sequence.finish_reason is None
    assert (sequence.num_generated, sequence.room, sequence.cached) == (3, 6, 0)
    assert (sequence.steps, sequence.drafted, sequence.accepted) == (3, 2, 1)
    append(sequence, [13])
    sequence.finish_reason = "abort"
    after = sequence.completion()
    assert after.token_ids.tolist() == [10, 11, 12, 13]
    for name in ("logprobs", "sampled_logprobs", "kept_mass", "weight_versions"):
        np.testing.assert_array_equal(getattr(after, name)[:3], getattr(before, name))


def test_a_completion_that_stopped_stays_as_it_is() -> None:
    before = partial("stop", [10, 3], stop_token=3)
    (sequence,) = request([4, 5], continue_from=before, max_tokens=9).sequences
    after = sequence.completion()
    assert (after.finish_reason, after.stop_token, after.text) == ("stop", 3, "some text")
    assert after.token_ids.tolist() == [10, 3]


def test_an_empty_partial_completion_is_a_fresh_start_with_its_seed() -> None:
    (sequence,) = request([4, 5], continue_from=partial("abort", [])).sequences
    assert (sequence.seed, sequence.num_generated, sequence.room) == (77, 0, 4)


@pytest.mark.parametrize(
    ("tokens", "sampling", "message"),
    [
        ([10, 11], {"n": 2}, "n must be 1, got 2"),
        ([10] * 5, {}, "has 5 tokens, but .* allow 4"),
        ([10, 50], {}, "continue_from.token_ids has token ids outside"),
    ],
)
def test_partial_completions_that_do_not_fit_are_refused(
    tokens: list[int], sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        request([4, 5], continue_from=partial("abort", tokens), **sampling)
    assert isinstance(raised.value, RolloutError)


def test_only_completions_can_be_resumed() -> None:
    with pytest.raises(ConfigError, match="continue_from"):
        request([4, 5], continue_from=[10, 11])


# Scoring


def test_a_scored_text_asks_for_the_completions_positions() -> None:
    made = intake(max_seq_len=40, cache_tokens=36).scoring_request([4, 5], [6, 7, 8], request_id="s", index=2)
    (sequence,) = made.sequences
    assert (sequence.length, sequence.score_from, sequence.uncached) == (5, 2, 4)
    assert sequence.tokens.tolist() == [4, 5, 6, 7, 8]
    assert len(sequence.logprobs) == 3
    assert made.index == 2


def test_an_empty_completion_has_nothing_to_compute() -> None:
    made = intake().scoring_request([4, 5], [], request_id="s", index=0)
    assert made.sequences[0].finish_reason == "length"
    assert len(made.sequences[0].logprobs) == 0


def test_texts_to_score_are_checked_like_prompts() -> None:
    scoring = intake(max_seq_len=40, cache_tokens=36)
    scoring.scoring_request([5] * 30, [6] * 6, request_id="s", index=0)
    with pytest.raises(PromptError, match=r"prompts\[3\].*37 tokens, at most 36"):
        scoring.scoring_request([5] * 30, [6] * 7, request_id="s", index=3)
    with pytest.raises(PromptError, match=r"completions\[1\].*vocabulary"):
        scoring.scoring_request([5], [60], request_id="s", index=1)
    with pytest.raises(PromptError, match=r"prompts\[1\] is empty"):
        scoring.scoring_request([], [6], request_id="s", index=1)
