"""Promises 1 and 2 with weights of 8 bits: the tokens are those of a plain loop over weights quantised in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.draft import DraftConfig
from tests.helpers.agreement import assert_agree
from tests.helpers.drafters import OracleDrafter
from tests.helpers.engines import complete, new_engine
from tests.helpers.expectations import LONGEST_COMPLETION, LONGEST_PROMPT, expect, unending
from tests.helpers.plain_quantized import quantized_tiny_model
from tests.helpers.random_cases import random_cases
from tests.helpers.tiny_tokenizer import tiny_tokenizer

REQUESTS = 10


@pytest.mark.parametrize(
    ("name", "weight_dtype"),
    [("qwen3_moe", "fp8"), ("deepseek_v3", "int8")],
)
def test_tokens_are_those_of_the_plain_loop_over_quantised_weights(name: str, weight_dtype: str) -> None:
    """Trees of the truth among nonsense, scarce pages, a warm prefix cache the second time, other weights the third."""
    page_size = 4
    for seed in (0, 1):
        model = quantized_tiny_model(name, weight_dtype, seed)
        cases = random_cases(
            np.random.default_rng(5 + seed),
            model.config,
            REQUESTS,
            longest_prompt=LONGEST_PROMPT,
            longest=LONGEST_COMPLETION,
        )
        expected = expect(model, cases, tiny_tokenizer(model.config.vocab_size, model.config.eos_token_ids))
        drafter = OracleDrafter(
            expected.sequences() + unending(expected, model), model.config.vocab_size, 0, mixed=True
        )
        if seed == 0:
            engine = new_engine(
                model,
                "roomy",
                drafter=drafter,
                max_seqs=4,
                page_size=page_size,
                kv_pages=2 * -(-(LONGEST_PROMPT + LONGEST_COMPLETION) // page_size),
                max_batch_tokens=40,
                draft=DraftConfig(max_nodes=8, gate=False),
                weight_dtype=weight_dtype,
            )
        else:
            engine.update_weights(model.params)
        for _ in range(2 - seed):
            completions = complete(engine, expected.cases)
            assert_agree(completions, expected.completions, expected.owners)
    assert engine.stats().pages_held == 0
