"""The trie learns several steps at once, and has learnt everything whenever anyone looks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.draft import TrieDrafter
from tests.helpers.tiny_models import tiny_model

MODEL = tiny_model("llama-tied")


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    """One that is never sure that drafts pay."""
    config = EngineConfig(max_seqs=4, page_size=16, max_batch_tokens=24, draft=DraftConfig(min_prob=0.999))
    return RolloutEngine(MODEL.config, MODEL.params, config=config)


def learnt(path: Path) -> int:
    drafter = TrieDrafter()
    drafter.load(path)
    return drafter.tokens_learnt


@pytest.mark.parametrize("steps", [1, 2, 7, 23])
def test_a_history_saved_between_steps_holds_every_token_so_far(
    engine: RolloutEngine, tmp_path: Path, steps: int
) -> None:
    assert isinstance(engine.drafter, TrieDrafter)
    before = engine.drafter.tokens_learnt
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [engine.submit([5, 6, number], sampling) for number in range(3)]
    for _ in range(steps):
        engine.step()
    generated = sum(sequence.num_generated for request in requests for sequence in request.sequences)
    assert generated > 0
    engine.save_history(tmp_path / "history")
    assert learnt(tmp_path / "history") - before == generated
    engine.abort()


def test_what_requests_said_is_learnt_by_their_end(engine: RolloutEngine) -> None:
    assert isinstance(engine.drafter, TrieDrafter)
    before = engine.drafter.tokens_learnt
    outputs = engine.generate([[1, 2], [3, 4, 5]], SamplingParams(max_tokens=31, ignore_eos=True))
    generated = sum(len(output.completions[0].token_ids) for output in outputs)
    assert engine.drafter.tokens_learnt - before == generated


def test_tokens_are_learnt_under_the_version_that_said_them(engine: RolloutEngine) -> None:
    assert isinstance(engine.drafter, TrieDrafter)
    engine.submit([7, 8, 9], SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(5):
        engine.step()
    seen: list[tuple[int, int]] = []
    drafter, before = engine.drafter, engine.drafter.tokens_learnt
    original = drafter.new_version
    drafter.new_version = lambda version: seen.append((version, drafter.tokens_learnt))  # type: ignore[method-assign]
    try:
        report = engine.update_weights(engine.params, mode="interrupt")
    finally:
        drafter.new_version = original  # type: ignore[method-assign]
    assert [version for version, _ in seen] == [report.version]
    assert seen[0][1] >= before
    assert seen[0][1] == drafter.tokens_learnt
    assert np.isfinite(engine.stats().acceptance_length)
