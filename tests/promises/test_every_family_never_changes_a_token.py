"""Promises 1 and 2 on every family: windows shorter than the context, soft caps, mixtures of experts, latents."""

from __future__ import annotations

import pytest

from rollout_spec.draft import DraftConfig
from rollout_spec.models import FAMILIES
from tests.helpers.agreement import assert_agree
from tests.helpers.drafters import OracleDrafter
from tests.helpers.engines import complete, new_engine
from tests.helpers.expectations import LONGEST_COMPLETION, LONGEST_PROMPT, expected_cases, unending
from tests.helpers.tiny_models import CONFIGS, tiny_model

REQUESTS = 10
TESTED_ELSEWHERE = ("llama", "llama-tied", "qwen2", "qwen2-tied")
NAMES = [name for name in CONFIGS if name not in TESTED_ELSEWHERE]


def test_every_family_has_a_tiny_model() -> None:
    assert {config.architecture for config in CONFIGS.values()} == set(FAMILIES) - {
        "mimo"
    }  # a qwen2 to the engine


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_plain_loop(name: str) -> None:
    """Trees of the truth among nonsense, scarce pages, a prefix cache that is warm the second time."""
    model = tiny_model(name)
    assert max((window or 0 for window in model.config.windows), default=0) < LONGEST_PROMPT
    expected = expected_cases(name, 77, REQUESTS)
    sequences = expected.sequences() + unending(expected, model)
    page_size = 4
    engine = new_engine(
        model,
        "roomy",
        drafter=OracleDrafter(sequences, model.config.vocab_size, 0, mixed=True),
        max_seqs=4,
        page_size=page_size,
        kv_pages=2 * -(-(LONGEST_PROMPT + LONGEST_COMPLETION) // page_size),
        max_batch_tokens=40,
        prefix_cache=True,
        draft=DraftConfig(max_nodes=8, gate=False),
    )
    for _ in range(2):
        completions = complete(engine, expected.cases)
        assert_agree(completions, expected.completions, expected.owners)
    assert engine.stats().pages_held == 0
