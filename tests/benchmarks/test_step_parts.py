"""The profile of a step measures every part, on a tiny model."""

from __future__ import annotations

from benchmarks import step_parts
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine
from tests.helpers.tiny_models import tiny_model


def test_every_part_of_a_step_takes_time() -> None:
    model = tiny_model("llama")
    config = EngineConfig(max_seqs=2, max_seq_len=64, draft=DraftConfig(kind="none"))
    engine = RolloutEngine(model.config, model.params, config=config)
    settings = step_parts.Settings(requests=(2,), cached=20, repeats=2)
    found = step_parts.parts(engine, 2, settings)
    assert set(found) == {"whole step", "matmuls and norms", "attention", "sampling", "host"}
    assert all(0 < milliseconds < 10_000 for milliseconds in found.values())
