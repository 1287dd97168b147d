"""Prefixes that had to leave the device come back from host memory, and tokens are those of an engine without it."""

from __future__ import annotations

import dataclasses

import numpy as np

from rollout_spec import EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.draft import DraftConfig
from tests.helpers.tiny_models import random_params, tiny_model

CONFIG = EngineConfig(
    max_seqs=2, page_size=4, kv_pages=16, max_batch_tokens=12, draft=DraftConfig(max_nodes=4, gate=False)
)


def play(engine: RolloutEngine, prompts: list[list[int]]) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=10, n=2, seed=5, temperature=0.7, ignore_eos=True)
    tokens = []
    for prompt in prompts:  # one after the other, so that each pushes out what was there
        output = engine.generate([prompt], sampling)[0]
        tokens += [completion.token_ids.tolist() for completion in output.completions]
    return tokens


def test_tokens_are_the_same_and_prefixes_come_back_while_their_weights_serve() -> None:
    model, rng = tiny_model("llama-tied"), np.random.default_rng(0)
    prompts = [rng.integers(0, model.config.vocab_size, 34).tolist() for _ in range(4)]
    plain = RolloutEngine(model.config, model.params, config=CONFIG)
    engine = RolloutEngine(
        model.config, model.params, config=dataclasses.replace(CONFIG, host_cache_bytes=1 << 20)
    )
    expected = play(plain, prompts)
    assert play(engine, prompts) == expected
    assert engine.stats().prompt_tokens_from_host == 0, "nothing was asked for twice"
    assert engine.stats().host_cache_bytes > 0
    computed = engine.stats().prompt_tokens_computed
    assert play(engine, prompts) == expected == play(plain, prompts)
    found = engine.stats()
    assert found.prompt_tokens_from_host > 0
    assert found.prompt_tokens_from_host % CONFIG.page_size == 0
    assert found.prompt_tokens_computed - computed < plain.stats().prompt_tokens_computed - computed
    assert 0 < found.host_cache_bytes <= 1 << 20
    assert found.pages_held == 0
    engine.sleep(level=1)
    engine.wake_up()
    assert play(engine, prompts) == expected, "what the host holds outlives the device's cache"
    assert engine.stats().prompt_tokens_from_host > found.prompt_tokens_from_host
    other = random_params(model.config, 3)
    for one in (plain, engine):
        one.update_weights(other)
        one.reset_stats()
    assert engine.stats().host_cache_bytes == 0
    assert play(engine, prompts) == play(plain, prompts) != expected
    assert engine.stats().prompt_tokens_from_host == 0


def test_a_limit_of_a_page_keeps_a_page() -> None:
    model, rng = tiny_model("llama-tied"), np.random.default_rng(1)
    probe = RolloutEngine(model.config, model.params, config=CONFIG)
    page_bytes = probe._core.executor.page_bytes
    engine = RolloutEngine(
        model.config, model.params, config=dataclasses.replace(CONFIG, host_cache_bytes=page_bytes)
    )
    play(engine, [rng.integers(0, model.config.vocab_size, 34).tolist() for _ in range(3)])
    assert engine.stats().host_cache_bytes == page_bytes
