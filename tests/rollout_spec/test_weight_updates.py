"""Updates of a running engine: what is reported, versions, and what each mode does with what runs.

tests/promises says that an update is whole, and that no token is wrong because of one.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from rollout_spec import RolloutEngine, SamplingParams
from rollout_spec.errors import ConfigError
from rollout_spec.weights.report import UPDATE_MODES
from tests.helpers.drafters import WatchingDrafter
from tests.helpers.engines import new_engine
from tests.helpers.plain_sampler import log_softmax
from tests.helpers.tiny_models import TinyModel, tiny_model

OLD, NEW = tiny_model("llama-tied", 0), tiny_model("llama-tied", 1)


def engine_of(model: TinyModel = OLD) -> RolloutEngine:
    return new_engine(model, "cramped", drafter=WatchingDrafter())


def sampling(tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)


def test_the_report_says_what_was_done() -> None:
    engine = engine_of()
    report = engine.update_weights(NEW.params)
    leaves = jax.tree.leaves(NEW.params)
    assert (report.version, report.previous_version, report.mode, report.applied) == (1, 0, "drain", True)
    assert (report.tensors, report.bytes) == (len(leaves), sum(leaf.nbytes for leaf in leaves))
    assert (report.skipped, report.ended, report.recomputed) == ((), (), 0)
    assert set(report.seconds) == {"stage", "wait", "swap"}
    assert min(report.seconds["stage"], report.seconds["swap"]) > 0
    assert report.seconds["wait"] >= 0
    partial = engine.update_weights({"norm": NEW.params["norm"]}, strict=False, version=9, mode="inflight")
    assert (partial.version, partial.previous_version, partial.tensors) == (9, 1, 1)
    assert len(partial.skipped) == len(leaves) - 1


def test_the_version_that_already_serves_is_not_loaded_again() -> None:
    engine = engine_of()
    engine.update_weights(NEW.params, version=3)
    request = engine.submit([1, 2], sampling(9))
    engine.step()
    report = engine.update_weights("not even looked at", version=3, mode="interrupt")
    assert (report.applied, report.version, report.previous_version, report.tensors) == (False, 3, 3, 0)
    assert not request.ended
    assert engine.drafter.versions == [3]  # type: ignore[union-attr]
    engine.abort()


def test_versions_may_go_back_but_must_be_whole_numbers() -> None:
    engine = engine_of()
    assert engine.update_weights(NEW.params, version=70).version == 70
    assert engine.update_weights(OLD.params, version=-2).version == -2
    assert engine.update_weights(OLD.params).version == -1
    for version in (1.0, "7", True, 2**31):
        with pytest.raises(ConfigError, match="version"):
            engine.update_weights(OLD.params, version=version)  # type: ignore[arg-type]
    assert engine.weight_version == -1


@pytest.mark.parametrize("mode", UPDATE_MODES)
def test_a_paused_engine_takes_weights_in_every_way_and_stays_paused(mode: Any) -> None:
    engine = engine_of()
    running = engine.submit([1, 2], sampling(9))
    for _ in range(3):
        engine.step()
    waiting = engine.submit([5, 6], sampling(4))
    engine.pause()
    report = engine.update_weights(NEW.params, mode=mode)
    assert report.ended == ((running.request_id,) if mode in ("drain", "interrupt") else ())
    assert report.recomputed == (1 if mode == "inflight" else 0)
    assert engine.step() == ([running] if mode in ("drain", "interrupt") else [])
    assert engine.stats().running == (1 if mode == "inflight_keep" else 0), "still paused"
    engine.resume()
    while not (running.ended and waiting.ended):
        engine.step()
    (completion,) = running.completions
    versions = completion.weight_versions.tolist()
    assert completion.finish_reason == ("abort" if mode == "interrupt" else "length")
    assert versions == sorted(versions)
    assert set(versions) == ({0} if mode in ("drain", "interrupt") else {0, 1})
    assert set(waiting.completions[0].weight_versions.tolist()) == {1}
    engine.close()


def test_a_paused_engine_with_nothing_begun_may_drain() -> None:
    engine = engine_of()
    engine.pause()
    request = engine.submit([1, 2], sampling(4))
    assert engine.update_weights(NEW.params).version == 1
    engine.resume()
    while not request.ended:
        engine.step()
    assert request.completions[0].weight_versions.tolist() == [1] * 4


def test_draining_hands_out_what_it_saw_through() -> None:
    engine = engine_of()
    running = [engine.submit([first, 2], sampling(3 + first)) for first in range(3)]
    engine.step()
    waiting = engine.submit([9], sampling(3))
    report = engine.update_weights(NEW.params, mode="drain")
    assert sorted(report.ended) == [request.request_id for request in running]
    assert all(request.ended for request in running)
    assert not waiting.ended
    assert waiting.status == "waiting"
    handed_out = []
    while not waiting.ended:
        handed_out += engine.step()
    assert {request.request_id for request in [*handed_out, *engine.step()]} == {0, 1, 2, waiting.request_id}


@pytest.mark.parametrize("mode", ["inflight", "inflight_keep"])
def test_tokens_after_the_swap_are_the_new_weights(mode: Any) -> None:
    """Recomputed under them in one mode; in the other the cached text keeps its old keys and values."""
    prompt = [1, 2, 3, 4, 5, 6, 7]
    engine = engine_of()
    request = engine.submit(prompt, sampling(30, seed=3))
    for _ in range(10):
        engine.step()
    before = request.sequences[0].num_generated
    assert before == 10
    computed = engine.stats().prompt_tokens_computed
    report = engine.update_weights(NEW.params, mode=mode)
    while not request.ended:
        engine.step()
    (completion,) = request.completions
    assert completion.weight_versions.tolist() == [0] * before + [1] * 20
    tokens = completion.token_ids.tolist()
    plain = {
        version: log_softmax(model.plain.logits([*prompt, *tokens]))[np.arange(30) + len(prompt) - 1, tokens]
        for version, model in enumerate((OLD, NEW))
    }
    np.testing.assert_allclose(completion.logprobs[:before], plain[0][:before], atol=2e-4)
    close = np.isclose(completion.logprobs[before:], plain[1][before:], atol=2e-4)
    recomputed = engine.stats().prompt_tokens_computed - computed
    if mode == "inflight":
        assert close.all()
        assert (report.recomputed, recomputed) == (1, len(prompt) + before)
    else:
        assert not close.any(), "the old keys and values are still seen"
        assert (report.recomputed, recomputed) == (0, 0)


@pytest.mark.parametrize("mode", UPDATE_MODES)
def test_a_prompt_cached_under_the_old_weights_is_computed_anew(mode: Any) -> None:
    prompt = list(range(20))
    engine = engine_of()
    engine.generate([prompt], sampling(2))
    running = engine.submit(prompt, sampling(12))
    engine.step()
    engine.update_weights(NEW.params, mode=mode)
    cached = engine.stats().prompt_tokens_cached
    engine.generate([prompt], sampling(2))
    # In mode inflight the running request, which was computed again, may have shared its prompt.
    if mode != "inflight":
        assert engine.stats().prompt_tokens_cached == cached
    while not running.ended:
        engine.step()
    logprobs = engine.generate([prompt], sampling(2))[0].completions[0].logprobs
    fresh = engine_of(NEW).generate([prompt], sampling(2))
    np.testing.assert_allclose(logprobs, fresh[0].completions[0].logprobs, atol=2e-4)
