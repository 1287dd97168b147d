"""Promise 6: every request ends exactly once, finished or failed with its reason, whatever happens to it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from rollout_spec import RolloutEngine, SamplingParams
from rollout_spec.errors import (
    DraftError,
    EngineStateError,
    RequestFailedError,
    RolloutError,
    UnknownRequestError,
)
from rollout_spec.requests import Request
from rollout_spec.tree import DraftTree
from rollout_spec.weights.update import UpdateMode
from tests.helpers.agreement import assert_agree, disagreement, same_tokens
from tests.helpers.drafters import AdversarialDrafter, TokenSequence, WatchingDrafter
from tests.helpers.engines import complete, new_engine, shared_engine
from tests.helpers.expectations import Expectation, expected_cases
from tests.helpers.plain_loop import plain_generate
from tests.helpers.plain_model import PlainModel
from tests.helpers.plain_sampler import Float64Array
from tests.helpers.random_cases import random_cases
from tests.helpers.tiny_models import tiny_model

MODEL = "qwen2"
SHAPE = "cramped"


@pytest.fixture
def expected() -> Expectation:
    return expected_cases(MODEL, 4000, 12)


def assert_idle_and_sound(engine: RolloutEngine, expected: Expectation) -> None:
    """Nothing is held or queued, and the engine generates what it should."""
    assert engine.step() == []
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_held) == (0, 0, 0)
    assert_agree(complete(engine, expected.cases), expected.completions, expected.owners)


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


class Patchwork:
    """Answers with the model whose weights produced each token of one completion, as plain loops ask for it."""

    def __init__(self, models: Sequence[PlainModel], versions: Sequence[int], prompt_length: int) -> None:
        self.models, self.versions, self.prompt_length = models, versions, prompt_length
        self.eos_token_ids = models[0].eos_token_ids
        self.max_length = models[0].max_length

    def last_logits(self, token_ids: Sequence[int]) -> Float64Array:
        return self.models[self.versions[len(token_ids) - self.prompt_length]].last_logits(token_ids)


class Chaos:
    """A user who submits, steps, aborts, pauses, sleeps and pushes weights in random order."""

    def __init__(self, engine: RolloutEngine, seed: int, modes: Sequence[UpdateMode]) -> None:
        self.engine = engine
        self.modes = modes
        self.rng = np.random.default_rng(seed)
        self.cases = random_cases(self.rng, engine.model_config, 60, longest_prompt=40)
        self.submitted: dict[Hashable, Request] = {}
        self.handed_out: list[Hashable] = []
        self.models = [tiny_model(MODEL, seed) for seed in range(2)]
        self.served = [self.models[0]]  # the model of each version

    def unfinished(self) -> list[Hashable]:
        return [key for key, request in self.submitted.items() if not request.ended]

    def submit(self) -> None:
        for _ in range(int(self.rng.integers(1, 5))):
            if self.cases:
                case = self.cases.pop()
                request = self.engine.submit(case.prompt, SamplingParams(**case.sampling))
                self.submitted[request.request_id] = request

    def step(self) -> None:
        for _ in range(int(self.rng.integers(1, 12))):
            self.handed_out += [request.request_id for request in self.engine.step()]

    def abort(self) -> None:
        unfinished = self.unfinished()
        if unfinished:
            chosen = self.rng.choice(len(unfinished), size=min(2, len(unfinished)), replace=False)
            self.engine.abort([unfinished[index] for index in chosen])

    def pause(self) -> None:
        self.engine.pause()
        before = self.engine.stats().steps
        self.step()
        assert self.engine.stats().steps == before, "a paused engine computes nothing"
        self.engine.resume()

    def sleep(self) -> None:
        self.engine.sleep()
        with pytest.raises(EngineStateError):
            self.engine.update_weights(self.models[0].params)
        self.engine.wake_up()

    def update(self) -> None:
        model = self.models[int(self.rng.integers(2))]
        self.engine.update_weights(model.params, mode=self.modes[int(self.rng.integers(len(self.modes)))])
        self.served.append(model)

    def bad_update(self) -> None:
        with pytest.raises(ValueError):
            self.engine.update_weights({"nonsense": np.zeros(2)})

    def run(self) -> None:
        actions = [self.submit, self.step, self.abort, self.pause, self.sleep, self.update, self.bad_update]
        weights = np.array([6, 10, 2, 1, 1, 1, 1])
        while self.cases or self.unfinished():
            action = actions[int(self.rng.choice(len(actions), p=weights / weights.sum()))]
            action()
        self.handed_out += [request.request_id for request in self.engine.step()]

    def faults(self) -> list[str]:
        """Completions that are not what the plain loop makes with the weights each token names."""
        faults = []
        models = [model.plain for model in self.served]
        for request in self.submitted.values():
            prompt = request.prompt_token_ids.tolist()
            for completion in request.completions:
                tokens = completion.token_ids.tolist()
                patchwork = Patchwork(models, completion.weight_versions.tolist(), len(prompt))
                sampling = dataclasses.asdict(request.sampling) | {"max_tokens": len(tokens)}
                expected = plain_generate(
                    patchwork, prompt, sampling, seed=completion.seed, tokenizer=self.engine.tokenizer
                )
                if completion.finish_reason == "abort":  # the plain loop has its own view of the end only
                    expected.finish_reason = "abort"
                fault = disagreement(completion, expected)
                if fault is not None:
                    faults.append(f"{request}: {fault}")
        return faults


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_user_does_each_request_ends_once_and_with_the_right_tokens(
    seed: int, expected: Expectation
) -> None:
    drafter = AdversarialDrafter(257, seed=seed)
    engine = new_engine(tiny_model(MODEL), SHAPE, drafter=drafter, prefix_cache=seed % 3 != 0)
    keeps_cache = seed == 5  # there tokens depend on old keys and values too, which the plain loop has not
    modes: list[UpdateMode] = ["drain", "interrupt", "inflight"]
    chaos = Chaos(engine, seed, ["inflight_keep"] if keeps_cache else modes)
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


class FaultyDrafter(AdversarialDrafter):
    """Raises in one of its methods, at its n-th call."""

    def __init__(self, method: str, call: int) -> None:
        super().__init__(257, seed=0)
        self.method, self.calls_left = method, call

    def _may_fail(self, method: str) -> None:
        if method == self.method:
            self.calls_left -= 1
            if self.calls_left == 0:
                raise OSError("the drafter broke")

    def start(self, request_id: Hashable, prompt: TokenSequence, group_id: Hashable = None) -> None:
        self._may_fail("start")
        super().start(request_id, prompt, group_id)

    def extend(self, request_id: Hashable, tokens: TokenSequence) -> None:
        self._may_fail("extend")
        super().extend(request_id, tokens)

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]:
        self._may_fail("propose")
        trees = super().propose(request_ids, budgets)
        if self.method == "malformed":
            self.calls_left -= 1
            if self.calls_left == 0:
                trees[0] = DraftTree([5, 5], [-1, 1], [0.5, 0.9])
        if self.method == "too few":
            self.calls_left -= 1
            if self.calls_left == 0:
                trees.pop()
        return trees

    def finish(self, request_id: Hashable) -> None:
        if request_id in self.contexts:  # unless start or an earlier finish had failed
            super().finish(request_id)
        self._may_fail("finish")

    @property
    def failed(self) -> bool:
        return self.calls_left <= 0


@pytest.mark.parametrize("method", ["start", "extend", "propose", "finish", "malformed", "too few"])
@pytest.mark.parametrize("call", [1, 6])
def test_a_drafter_that_fails_costs_no_request_its_end(method: str, call: int, expected: Expectation) -> None:
    drafter = FaultyDrafter(method, call)
    engine = new_engine(tiny_model(MODEL), SHAPE, drafter=drafter)
    requests = [engine.submit(case.prompt, SamplingParams(**case.sampling)) for case in expected.cases]
    handed_out = []
    for _ in range(1000):
        handed_out += engine.step()
        if len(handed_out) == len(requests):
            break
    assert drafter.failed
    assert Counter(id(request) for request in handed_out) == Counter(id(request) for request in requests)
    completions, plain, failed = [], iter(expected.completions), 0
    for request in requests:
        wanted = [next(plain) for _ in range(request.sampling.n)]
        if request.status == "failed":
            failed += 1
            assert isinstance(request.error, OSError | DraftError)
            assert request.completions == []
        else:
            assert_agree(request.completions, wanted)
            completions += request.completions
    assert failed < len(requests), "what was not running in the step that failed must finish"
    assert_idle_and_sound(engine, expected)


def test_generate_reports_what_failed_and_keeps_what_did_not(expected: Expectation) -> None:
    engine = new_engine(tiny_model(MODEL), SHAPE, drafter=FaultyDrafter("propose", 8))
    cases = expected.cases
    with pytest.raises(RequestFailedError, match="the drafter broke") as raised:
        engine.generate([case.prompt for case in cases], [SamplingParams(**case.sampling) for case in cases])
    error = raised.value
    assert isinstance(error, RolloutError)
    assert isinstance(error.__cause__, OSError)
    assert len(error.outputs) == len(cases)
    assert sum(output is None for output in error.outputs) == len(error.requests) > 0
    plain = iter(expected.completions)
    for case, output in zip(cases, error.outputs, strict=True):
        wanted = [next(plain) for _ in range(case.sampling.get("n", 1))]
        if output is not None:
            assert_agree(output.completions, wanted)
    assert_idle_and_sound(engine, expected)


def test_a_device_failure_that_loses_the_cache_is_survived(
    expected: Expectation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a device runs out of memory in mid-step: the donated cache is gone, and nothing may rely on it."""
    engine = new_engine(tiny_model(MODEL), SHAPE, drafter=WatchingDrafter())
    complete(engine, expected.cases)  # fills the prefix cache
    executor = engine._core.executor
    whole_step = executor._step

    def fails(params: Any, state: Any, batch: Any) -> Any:
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        raise RuntimeError("RESOURCE_EXHAUSTED")

    requests = [engine.submit(case.prompt, SamplingParams(**case.sampling)) for case in expected.cases]
    for _ in range(4):
        engine.step()
    monkeypatch.setattr(executor, "_step", fails)
    engine.step()
    monkeypatch.setattr(executor, "_step", whole_step)
    while not all(request.ended for request in requests):
        engine.step()
    engine.step()
    failed = [request for request in requests if request.status == "failed"]
    assert 0 < len(failed) < len(requests)
    assert all("RESOURCE_EXHAUSTED" in str(request.error) for request in failed)
    assert_idle_and_sound(engine, expected)


def test_a_keyboard_interrupt_leaves_a_sound_engine(
    expected: Expectation, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(tiny_model(MODEL), SHAPE)
    executor = engine._core.executor
    whole_step, calls = executor._step, iter(range(100))

    def interrupted(params: Any, state: Any, batch: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return whole_step(params, state, batch)

    monkeypatch.setattr(executor, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        complete(engine, expected.cases)
    monkeypatch.setattr(executor, "_step", whole_step)
    engine.abort()
    engine.step()
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
