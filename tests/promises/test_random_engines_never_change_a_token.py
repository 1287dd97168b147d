"""Promises 1 and 2 on engines of random sizes, scarce pages among them; raise ENGINES to search longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollout_spec.draft import DraftConfig, Drafter
from rollout_spec.tree import MAX_NODES
from tests.helpers.agreement import NUMBER_TOLERANCE, assert_agree
from tests.helpers.drafters import AdversarialDrafter, OracleDrafter, WatchingDrafter
from tests.helpers.engines import complete, new_engine
from tests.helpers.expectations import (
    LONGEST_COMPLETION,
    LONGEST_PROMPT,
    Expectation,
    expected_cases,
    unending,
)
from tests.helpers.tiny_models import CONFIGS, TinyModel, tiny_model

ENGINES = 2  # each compiles its step sizes anew, which is what takes the time
REQUESTS = 60


@dataclass(frozen=True)
class RandomEngine:
    """A model, EngineConfig values and a kind of drafter."""

    model_name: str
    drafter: str
    values: dict[str, Any]

    def new_drafter(self, model: TinyModel, expected: Expectation, seed: int) -> Drafter | None:
        """None: the engine makes its own, a trie."""
        vocab_size = model.config.vocab_size
        if self.drafter == "trie":
            return None
        if self.drafter == "nonsense":
            return AdversarialDrafter(vocab_size, seed)
        sequences = expected.sequences() + unending(expected, model)
        return OracleDrafter(sequences, vocab_size, seed, mixed=self.drafter == "truth in nonsense")


def random_engine(seed: int) -> RandomEngine:
    rng = np.random.default_rng(seed)
    max_seqs = int(rng.integers(1, 9))
    page_size = int(rng.integers(1, 33))
    one_request = -(-(LONGEST_PROMPT + LONGEST_COMPLETION) // page_size)
    draft = DraftConfig(
        max_nodes=int(rng.choice([1, 2, 5, 16, MAX_NODES])),
        branching=bool(rng.random() < 0.7),
        gate=bool(rng.random() < 0.4),
        capacity_tokens=int(rng.choice([50, 2_000, 100_000])),
    )
    return RandomEngine(
        model_name=str(rng.choice(list(CONFIGS))),
        drafter=str(rng.choice(["trie", "nonsense", "truth", "truth in nonsense"])),
        values={
            "max_seqs": max_seqs,
            "page_size": page_size,
            "kv_pages": int(rng.integers(one_request, 3 * one_request)) if rng.random() < 0.7 else None,
            "max_batch_tokens": max_seqs + int(rng.integers(0, 60)),
            "prefix_cache": bool(rng.random() < 0.7),
            "draft": draft,
        },
    )


@pytest.mark.parametrize("seed", range(ENGINES))
def test_tokens_and_scores_are_those_of_the_plain_loop(seed: int) -> None:
    chosen = random_engine(seed)
    model = tiny_model(chosen.model_name)
    expected = expected_cases(chosen.model_name, 10_000 + seed, REQUESTS)
    drafter = chosen.new_drafter(model, expected, seed)
    engine = new_engine(model, "roomy", drafter=drafter, **chosen.values)
    for _ in range(2):  # the second time with a warm prefix cache and a drafter that remembers
        completions = complete(engine, expected.cases)
        assert_agree(completions, expected.completions, expected.owners)
    scores = engine.score([case.prompt for case in expected.owners], completions)
    for completion, score in zip(completions, scores, strict=True):
        np.testing.assert_allclose(score, completion.logprobs, atol=NUMBER_TOLERANCE)
    assert engine.stats().pages_held == 0
    if isinstance(drafter, WatchingDrafter):
        assert drafter.contexts == {}
