"""Promises 1 and 2 with caches of 8 bits: drafts, chunks, shared prefixes and preemption never change a token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_spec import RolloutEngine, SamplingParams
from rollout_spec.cache_scales import MARGINS
from rollout_spec.draft import DraftConfig
from rollout_spec.errors import ConfigError
from tests.helpers.drafters import OracleDrafter
from tests.helpers.engines import complete, new_engine
from tests.helpers.expectations import LONGEST_COMPLETION, LONGEST_PROMPT, expected_cases, unending
from tests.helpers.tiny_models import random_params, tiny_model

TYPES = {"int8": (jnp.int8, 127), "fp8": (jnp.float8_e4m3fn, 448)}
MODEL = {"int8": "llama-tied", "fp8": "gemma3"}


@functools.cache
def plain_engine(cache_dtype: str) -> RolloutEngine:
    """One request at a time, nothing drafted, nothing shared."""
    model = tiny_model(MODEL[cache_dtype])
    return new_engine(model, "roomy", max_seqs=1, prefix_cache=False, cache_dtype=cache_dtype)


def scales(engine: RolloutEngine) -> np.ndarray:
    return np.asarray(engine._core.executor.state.cache_scales)


@pytest.mark.parametrize("cache_dtype", TYPES)
def test_tokens_are_those_of_one_request_at_a_time_without_drafts(cache_dtype: str) -> None:
    name, page_size = MODEL[cache_dtype], 4
    model, plain = tiny_model(name), plain_engine(cache_dtype)
    expected = expected_cases(name, 21, 12)
    engine = new_engine(
        model,
        "roomy",
        drafter=OracleDrafter(
            expected.sequences() + unending(expected, model), model.config.vocab_size, 0, mixed=True
        ),
        max_seqs=4,
        page_size=page_size,
        kv_pages=2 * -(-(LONGEST_PROMPT + LONGEST_COMPLETION) // page_size),
        max_batch_tokens=40,
        draft=DraftConfig(max_nodes=8, gate=False),
        cache_dtype=cache_dtype,
    )
    wanted = [completion for case in expected.cases for completion in complete(plain, [case])]
    for _ in range(2):
        for ours, theirs in zip(complete(engine, expected.cases), wanted, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-3)
    assert engine.stats().accepted > 0
    assert engine.stats().preemptions > 0
    assert {pages.dtype for pages in engine._core.executor.state.kv_pages} == {
        jnp.dtype(TYPES[cache_dtype][0])
    }
    assert engine.stats().pages_held == 0


@pytest.mark.parametrize("cache_dtype", TYPES)
def test_a_quantised_cache_is_near_to_a_full_one_and_a_quarter_of_it(cache_dtype: str) -> None:
    model, plain = tiny_model(MODEL[cache_dtype]), plain_engine(cache_dtype)
    full = new_engine(model, "roomy", max_seqs=1, prefix_cache=False)
    prompt, text = [5, 6, 7], np.arange(20) % model.config.vocab_size
    errors = np.abs(full.score([prompt], [text])[0] - plain.score([prompt], [text])[0])
    assert 0 < errors.max() < (0.5 if cache_dtype == "int8" else 2.0)
    assert plain._core.executor.page_bytes * 4 == full._core.executor.page_bytes


@pytest.mark.parametrize("cache_dtype", TYPES)
def test_scales_are_a_function_of_the_weights_that_serve(cache_dtype: str) -> None:
    engine, model = plain_engine(cache_dtype), tiny_model(MODEL[cache_dtype])
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, seed=0)
    engine.update_weights(model.params)
    first = engine.generate([[1, 2, 3]], sampling)[0].completions[0].token_ids
    of_first = scales(engine)
    assert of_first.shape == (model.config.num_layers, 2, model.config.num_kv_heads)
    doubled = jax.tree.map(lambda leaf: leaf, model.params)
    values = doubled["layers"][0]["self_attn"]["v_proj"]
    values |= {name: 2 * leaf for name, leaf in values.items()}
    engine.update_weights(doubled)
    engine.generate([[1, 2, 3]], sampling)
    np.testing.assert_allclose(scales(engine)[0, 1], 2 * of_first[0, 1], rtol=1e-6)
    np.testing.assert_allclose(scales(engine)[0, 0], of_first[0, 0], rtol=1e-6)
    request = engine.submit([1, 2, 3], sampling)
    engine.step()
    engine.update_weights(model.params, mode="inflight_keep")
    while not request.ended:
        engine.step()
    np.testing.assert_allclose(scales(engine)[0, 1], 2 * of_first[0, 1], rtol=1e-6)
    engine.update_weights(random_params(model.config, 3))
    engine.update_weights(model.params)
    engine.sleep(level=1)
    engine.wake_up()
    assert (engine.generate([[1, 2, 3]], sampling)[0].completions[0].token_ids == first).all()
    assert (scales(engine) == of_first).all()
    assert MARGINS[jnp.dtype(TYPES[cache_dtype][0]).name] >= 1


def test_a_cache_of_latents_is_refused() -> None:
    with pytest.raises(ConfigError, match="deepseek_v2 caches latents"):
        new_engine(tiny_model("deepseek_v2"), "roomy", cache_dtype="int8")
