"""An engine in its thread: messages are taken in order, whatever it does, and every sample is answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rollout_spec import RolloutEngine, SamplingParams
from rollout_spec.pool.messages import Abort, Call, Ended, LearntText, Report, Sample, Submit
from rollout_spec.pool.runner import EngineRunner
from tests.rollout_spec.pool import pools


def engine() -> RolloutEngine:
    return RolloutEngine(pools.model().config, pools.model().params, config=pools.CONFIG)


class Talk:
    """A runner with the numbers that its messages need."""

    def __init__(self, build: Callable[[], RolloutEngine] = engine) -> None:
        self.runner = EngineRunner(build, lambda made: made.config)
        self.posts = 0
        self.reports: list[Report] = []

    def post(self, *messages: Any) -> None:
        self.runner.post(self.posts, list(messages))
        self.posts += 1

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(600):
            if condition():
                return
            self.reports.append(self.runner.report(0.1))
        raise AssertionError("it didn't happen")

    @property
    def ended(self) -> list[Ended]:
        return [one for report in self.reports for one in report.ended]

    @property
    def answers(self) -> dict[int, Any]:
        found = [one for report in self.reports for one in report.answers]
        return {one.number: one.error if one.error is not None else one.result for one in found}


@pytest.fixture
def talk() -> Iterator[Talk]:
    made = Talk()
    yield made
    made.post(Call(99, "close"))
    made.until(lambda: 99 in made.answers)


def sample(number: int, tokens: int = 5, prompt: tuple[int, ...] = (4, 5)) -> Sample:
    sampling = SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True)
    return Sample((number, 0), 1, np.array(prompt, np.int32), sampling, "group")


def test_samples_end_as_in_an_engine(talk: Talk) -> None:
    talk.post(Submit([sample(number) for number in range(9)]))
    talk.until(lambda: len(talk.ended) == 9)
    for one in talk.ended:
        assert one.attempt == 1
        assert one.completion is not None
        (wanted,) = pools.expected([[4, 5]], SamplingParams(max_tokens=5, seed=one.key[0], ignore_eos=True))
        assert one.completion.token_ids.tolist() == wanted.completions[0].token_ids.tolist()


def test_messages_are_taken_in_the_order_of_their_numbers(talk: Talk) -> None:
    talk.runner.post(1, [Abort([(1, 0)])])
    time.sleep(0.05)
    talk.runner.post(0, [Submit([sample(1, tokens=60)])])
    talk.posts = 2
    talk.until(lambda: len(talk.ended) == 1)
    completion = talk.ended[0].completion
    assert completion is None or completion.finish_reason == "abort"


def test_a_refused_sample_says_so(talk: Talk) -> None:
    talk.post(Submit([sample(1, prompt=(4,) * 90)]))
    talk.until(lambda: len(talk.ended) == 1)
    assert talk.ended[0].refused
    assert "90 tokens" in str(talk.ended[0].error)


def engine_of_steps_that_take(seconds: float) -> Callable[[], RolloutEngine]:
    def build() -> RolloutEngine:
        made = engine()
        step = made.step

        def slowly() -> Any:
            time.sleep(seconds)
            return step()

        made.step = slowly  # type: ignore[method-assign]
        return made

    return build


def test_a_drain_holds_what_has_not_begun() -> None:
    talk = Talk(engine_of_steps_that_take(0.05))
    talk.post(Submit([sample(number, tokens=40) for number in range(8)]))
    talk.until(lambda: bool(talk.reports and talk.reports[-1].tokens))
    weights = lambda: pools.model().params  # noqa: E731
    talk.post(
        Call(
            1, "update", {"weights": weights, "version": 7, "mode": "drain", "overlap": True, "strict": True}
        )
    )
    talk.until(lambda: len(talk.ended) == 8 and 1 in talk.answers)
    assert talk.answers[1].version == 7
    versions = [set(one.completion.weight_versions.tolist()) for one in talk.ended if one.completion]
    assert all(len(one) == 1 for one in versions)
    assert set.union(*versions) == {0, 7}


def test_texts_of_others_are_learnt_beside_the_steps(talk: Talk) -> None:
    talk.until(lambda: -1 in talk.answers)
    drafter = talk.runner.engine.drafter
    assert drafter is not None
    talk.runner.learn([LearntText(1, "group", np.arange(4, 9), np.arange(5, 35))])
    talk.until(lambda: drafter.tokens_learnt == 30)  # type: ignore[attr-defined]


def test_a_call_that_fails_is_answered_and_the_engine_goes_on(talk: Talk) -> None:
    talk.post(Call(1, "load_history", {"path": "/nowhere"}), Call(2, "stats"))
    talk.until(lambda: {1, 2} <= talk.answers.keys())
    assert isinstance(talk.answers[1], OSError)
    assert talk.answers[2].requests_finished == 0


def test_an_engine_that_breaks_says_why() -> None:
    def broken() -> RolloutEngine:
        made = engine()
        made.step = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        return made

    talk = Talk(broken)
    talk.post(Submit([sample(1)]))
    talk.until(lambda: bool(talk.reports) and talk.reports[-1].broken is not None)
    assert isinstance(talk.reports[-1].broken, ZeroDivisionError)


def test_a_long_step_shows_in_the_reports() -> None:
    talk = Talk(engine_of_steps_that_take(1.0))
    talk.post(Submit([sample(1, tokens=1)]))
    talk.until(lambda: len(talk.ended) == 1)
    assert max(report.busy_s for report in talk.reports if report.doing == "a step") > 0.5
