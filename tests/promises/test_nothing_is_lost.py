"""Promise 6: every request ends exactly once, finished or failed with its reason, whatever happens to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np
import pytest

from rollout_spec import SamplingParams
from rollout_spec.errors import EngineStateError, UnknownRequestError
from rollout_spec.weights.report import UpdateMode
from tests.helpers.agreement import assert_agree, same_tokens
from tests.helpers.chaos import Chaos
from tests.helpers.drafters import AdversarialDrafter, WatchingDrafter
from tests.helpers.engines import assert_idle_and_sound, complete, new_engine, shared_engine
from tests.helpers.expectations import Expectation, expected_cases
from tests.helpers.random_cases import random_cases
from tests.helpers.tiny_models import tiny_model

MODEL = "qwen2"
SHAPE = "cramped"


@pytest.fixture
def expected() -> Expectation:
    return expected_cases(MODEL, 4000, 12)


def test_a_thousand_queued_requests_end_once_each(expected: Expectation) -> None:
    shared = shared_engine(MODEL, "roomy")
    cases = random_cases(np.random.default_rng(0), shared.model.config, 1000, longest_prompt=12, longest=5)
    with shared.drafting(AdversarialDrafter(257, seed=0)) as engine:
        requests = [engine.submit(case.prompt, SamplingParams(**case.sampling)) for case in cases]
        assert engine.stats().waiting >= 1000
        handed_out: list[Hashable] = []
        while len(handed_out) < 1000:
            handed_out += [request.request_id for request in engine.step()]
        assert Counter(handed_out) == Counter(request.request_id for request in requests)
        assert all(
            len(request.completions) == case.sampling.get("n", 1)
            for request, case in zip(requests, cases, strict=True)
        )
        assert_idle_and_sound(engine, expected)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_user_does_each_request_ends_once_and_with_the_right_tokens(
    seed: int, expected: Expectation
) -> None:
    drafter = AdversarialDrafter(257, seed=seed)
    engine = new_engine(tiny_model(MODEL), SHAPE, drafter=drafter, prefix_cache=seed % 3 != 0)
    keeps_cache = seed == 5  # there tokens depend on old keys and values too, which the plain loop has not
    modes: list[UpdateMode] = ["drain", "interrupt", "inflight"]
    models = [tiny_model(MODEL, number) for number in range(2)]
    chaos = Chaos(engine, models, seed, ["inflight_keep"] if keeps_cache else modes)
    chaos.run()
    assert keeps_cache or chaos.faults() == []
    assert Counter(chaos.handed_out) == Counter(list(chaos.submitted))
    reasons: Counter[str] = Counter()
    for request in chaos.submitted.values():
        assert request.status == "finished"
        assert request.error is None
        assert len(request.completions) == request.sampling.n
        for completion in request.completions:
            reasons[completion.finish_reason] += 1
            assert len(completion.token_ids) <= request.sampling.max_tokens
            assert len(completion.weight_versions) == len(completion.token_ids)
            assert np.isfinite(completion.logprobs).all()
    assert set(reasons) == {"stop", "length", "abort"}
    assert drafter.contexts == {}
    assert drafter.versions == list(range(1, engine.weight_version + 1))
    engine.update_weights(tiny_model(MODEL).params)
    assert_idle_and_sound(engine, expected)


def test_abort_while_prefilling_queued_and_running(expected: Expectation) -> None:
    drafter = WatchingDrafter()
    engine = new_engine(tiny_model(MODEL), SHAPE, drafter=drafter)
    sampling = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    long_prompt = list(range(60))  # five steps of twelve tokens
    prefilling = engine.submit(long_prompt, sampling)
    engine.step()
    assert prefilling.status == "running"
    queued = engine.submit([1, 2], sampling)
    engine.abort([prefilling.request_id, queued.request_id])
    for request in (prefilling, queued):
        (completion,) = request.completions
        assert (completion.finish_reason, len(completion.token_ids)) == ("abort", 0)
        assert completion.stop_token is None
    assert engine.stats().pages_held == 0
    running = engine.submit(long_prompt, sampling)
    other = engine.submit(long_prompt[:30], sampling)
    while not (running.sequences and running.sequences[0].num_generated >= 3):
        engine.step()
    engine.abort([running.request_id])
    assert running.completions[0].finish_reason == "abort"
    assert 3 <= len(running.completions[0].token_ids) < 20
    while not other.ended:
        engine.step()
    alone = new_engine(tiny_model(MODEL), SHAPE).generate([long_prompt[:30]], sampling)
    assert same_tokens(other.completions, alone[0].completions)
    for ended in (running, other):
        with pytest.raises(UnknownRequestError) as raised:
            engine.abort([ended.request_id])
        assert isinstance(raised.value, KeyError)
    assert drafter.contexts == {}
    assert_idle_and_sound(engine, expected)


def test_aborting_an_unknown_request_aborts_nothing(expected: Expectation) -> None:
    engine = new_engine(tiny_model(MODEL), SHAPE)
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=5, seed=0, ignore_eos=True))
    with pytest.raises(UnknownRequestError, match="who"):
        engine.abort([request.request_id, "who"])
    assert not request.ended
    while not request.ended:
        engine.step()
    assert len(request.completions[0].token_ids) == 5
    assert_idle_and_sound(engine, expected)


def test_a_request_id_is_unique_among_unfinished_requests(expected: Expectation) -> None:
    engine = new_engine(tiny_model(MODEL), SHAPE)
    sampling = SamplingParams(max_tokens=3, seed=0)
    first = engine.submit([1], sampling, request_id="mine")
    with pytest.raises(ValueError, match="mine"):
        engine.submit([2], sampling, request_id="mine")
    while not first.ended:
        engine.step()
    again = engine.submit([1], sampling, request_id="mine")
    while not again.ended:
        engine.step()
    assert same_tokens(first.completions, again.completions)
    assert_idle_and_sound(engine, expected)


def test_stream_yields_each_prompt_once_and_closing_it_aborts_the_rest(expected: Expectation) -> None:
    engine = new_engine(tiny_model(MODEL), SHAPE)
    prompts = [case.prompt for case in expected.cases]
    samplings = [SamplingParams(**case.sampling) for case in expected.cases]
    outputs = list(engine.stream(prompts, samplings))
    assert sorted(output.index for output in outputs) == list(range(len(prompts)))
    assert [output.index for output in outputs] != sorted(output.index for output in outputs)
    by_place = sorted(outputs, key=lambda output: output.index)
    completions = [completion for output in by_place for completion in output.completions]
    assert_agree(completions, expected.completions, expected.owners)

    stream = engine.stream(prompts, samplings)
    next(stream)
    stream.close()
    assert_idle_and_sound(engine, expected)


def test_requests_submitted_by_hand_survive_a_generate_beside_them(expected: Expectation) -> None:
    engine = new_engine(tiny_model(MODEL), SHAPE)
    sampling = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    mine = [engine.submit([first, 2, 3], sampling) for first in range(3)]
    engine.score([[1, 2]], [[3, 4]])
    assert_agree(complete(engine, expected.cases), expected.completions)
    handed_out = []
    for _ in range(200):
        handed_out += engine.step()
    assert Counter(request.request_id for request in handed_out) == Counter(r.request_id for r in mine)
    alone = new_engine(tiny_model(MODEL), SHAPE).generate([[first, 2, 3] for first in range(3)], sampling)
    assert same_tokens(
        [completion for request in mine for completion in request.completions],
        [completion for output in alone for completion in output.completions],
    )


def test_sleep_frees_the_cache_and_tokens_are_the_same_afterwards(expected: Expectation) -> None:
    engine = new_engine(tiny_model(MODEL), SHAPE, drafter=AdversarialDrafter(257, seed=0))
    requests = [engine.submit(case.prompt, SamplingParams(**case.sampling)) for case in expected.cases]
    for _ in range(3):
        for _ in range(5):
            engine.step()
        engine.sleep()
        with pytest.raises(EngineStateError, match="wake_up"):
            engine.step()
        with pytest.raises(EngineStateError, match="wake_up"):
            engine.generate([[1]])
        engine.wake_up()
    while not all(request.ended for request in requests):
        engine.step()
    engine.step()
    completions = [completion for request in requests for completion in request.completions]
    assert_agree(completions, expected.completions, expected.owners)
    assert_idle_and_sound(engine, expected)


def test_generate_on_a_paused_engine_says_so_instead_of_waiting_for_ever() -> None:
    engine = new_engine(tiny_model(MODEL), SHAPE)
    engine.pause()
    with pytest.raises(EngineStateError, match="resume"):
        engine.generate([[1]], SamplingParams(max_tokens=2))
    engine.resume()
    assert engine.stats().waiting == 0
    assert len(engine.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))) == 1


def test_closing_fails_what_is_unfinished_with_the_reason() -> None:
    engine = new_engine(tiny_model(MODEL), SHAPE)
    requests = [engine.submit([first], SamplingParams(max_tokens=20, ignore_eos=True)) for first in range(6)]
    for _ in range(3):
        engine.step()
    engine.close()
    engine.close()
    for request in requests:
        assert request.status == "failed"
        assert isinstance(request.error, EngineStateError)
    for call in (engine.step, lambda: engine.generate([[1]]), lambda: engine.submit([1]), engine.abort):
        with pytest.raises(EngineStateError, match="closed"):
            call()
