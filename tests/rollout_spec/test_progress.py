"""The progress bar shows what was asked for, and nothing when it wasn't."""

from __future__ import annotations

import pytest

from rollout_spec import EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.progress import Progress
from tests.helpers.tiny_models import tiny_model

MODEL = tiny_model("llama-tied")


def test_a_bar_shows_prompts_done_tokens_per_second_and_acceptance_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress(True, "prompts", 3) as bar:
        bar.advance(2)
        bar.report(tokens=40, decode_steps=20)
    shown = capsys.readouterr().out
    assert "prompts" in shown
    assert "2/3" in shown
    assert "tokens/s" in shown
    assert "acceptance length 2.00" in shown


@pytest.mark.parametrize("progress", [True, False])
def test_generate_shows_a_bar_only_on_request(progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    engine = RolloutEngine(MODEL.config, MODEL.params, config=EngineConfig(max_seqs=2, max_seq_len=32))
    engine.generate([[1, 2], [3]], SamplingParams(max_tokens=3, seed=0), progress=progress)
    shown = capsys.readouterr().out
    assert ("2/2" in shown) == progress
    assert ("acceptance length" in shown) == progress
    if not progress:
        assert shown == ""
