"""Where every layer has a window, a sequence holds the pages of its window only, and its tokens stay what they are."""

from __future__ import annotations

from rollout_spec import EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.draft import DraftConfig
from tests.helpers.tiny_models import CONFIGS, tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12] * 3, [5, 6, 7, 8, 9, 10, 11, 12] * 3, [9, 8, 7]]
CONFIG = EngineConfig(
    max_seqs=2, page_size=4, kv_pages=16, max_batch_tokens=12, draft=DraftConfig(max_nodes=4, gate=False)
)


def play(engine: RolloutEngine) -> tuple[list[list[int]], int]:
    """All tokens, and the most pages that were held at once."""
    sampling = SamplingParams(max_tokens=34, n=2, seed=5, temperature=0.7, ignore_eos=True)
    requests, most = [engine.submit(prompt, sampling) for prompt in PROMPTS], 0
    while not all(request.ended for request in requests):
        engine.step()
        most = max(most, engine.stats().pages_held)
    assert engine.stats().pages_held == 0
    return [one.token_ids.tolist() for request in requests for one in request.completions], most


def test_pages_in_use_are_bounded_and_tokens_are_those_of_an_engine_that_frees_nothing() -> None:
    model = tiny_model("mistral")
    window = model.config.widest_window
    assert window == 7
    engine, hoarding = (RolloutEngine(model.config, model.params, config=CONFIG) for _ in range(2))
    hoarding._core.scheduler._window = None
    expected, most_hoarded = play(hoarding)
    for _ in range(2):  # the second time with a prefix cache and a history
        tokens, most = play(engine)
        assert tokens == expected
        held = engine._core.scheduler.most_held
        assert held is not None
        assert most <= 2 * held
    assert most < most_hoarded
    assert engine.stats().accepted > 0


def test_a_model_with_a_layer_that_sees_all_gives_nothing_back() -> None:
    assert CONFIGS["gemma2"].widest_window is None
    assert CONFIGS["gemma3"].widest_window is None
    assert CONFIGS["llama"].widest_window is None
