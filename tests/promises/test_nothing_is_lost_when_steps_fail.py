"""Promise 6 again: an exception in a step ends what ran in it with its reason, and the engine serves on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import pytest

from rollout_spec import SamplingParams
from rollout_spec.errors import DraftError, RequestFailedError, RolloutError
from rollout_spec.tree import DraftTree
from tests.helpers.agreement import assert_agree
from tests.helpers.drafters import AdversarialDrafter, TokenSequence, WatchingDrafter
from tests.helpers.engines import assert_idle_and_sound, complete, new_engine
from tests.helpers.expectations import Expectation, expected_cases
from tests.helpers.tiny_models import tiny_model

MODEL = "qwen2"
SHAPE = "cramped"


@pytest.fixture
def expected() -> Expectation:
    return expected_cases(MODEL, 4000, 12)


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

    def fails(params: Any, state: Any, *rest: Any) -> Any:
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

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return whole_step(*arguments)

    monkeypatch.setattr(executor, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        complete(engine, expected.cases)
    monkeypatch.setattr(executor, "_step", whole_step)
    engine.abort()
    engine.step()
    assert_idle_and_sound(engine, expected)
