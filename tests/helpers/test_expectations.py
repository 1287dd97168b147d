"""The random cases reach what they are meant to reach."""

from __future__ import annotations

from tests.helpers.expectations import LONGEST_COMPLETION, LONGEST_PROMPT, expected_cases, unending
from tests.helpers.tiny_models import tiny_model


def test_random_cases_repeat_prompts_and_use_every_parameter() -> None:
    expected = expected_cases("llama", 123, 150)
    prompts = [tuple(case.prompt) for case in expected.cases]
    assert len(set(prompts)) < len(prompts)
    assert len({prompt[:3] for prompt in prompts}) < len(set(prompts))
    assert max(map(len, prompts)) == LONGEST_PROMPT
    assert max(len(completion.token_ids) for completion in expected.completions) == LONGEST_COMPLETION
    used = {name for case in expected.cases for name in case.sampling}
    assert used == {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "bad_token_ids",
        "max_tokens",
        "min_tokens",
        "stop_token_ids",
        "stop",
        "ignore_eos",
        "n",
        "seed",
    }


def test_unending_sequences_go_on_behind_end_tokens() -> None:
    expected = expected_cases("llama", 123, 150)
    longer = {tuple(sequence) for sequence in unending(expected, tiny_model("llama"))}
    stopped = [
        tuple(sequence)
        for sequence, completion in zip(expected.sequences(), expected.completions, strict=True)
        if completion.finish_reason == "stop"
    ]
    assert any(long[: len(short)] == short and len(long) > len(short) for short in stopped for long in longer)
