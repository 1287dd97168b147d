"""Streams: their order, their end, and what else may happen beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_spec import RolloutEngine
from rollout_spec.errors import (
    EngineStateError,
    PromptError,
    RequestFailedError,
)
from tests.rollout_spec.watched_engine import run, sampling


def test_a_stream_is_in_the_order_in_which_prompts_end(engine: RolloutEngine) -> None:
    lengths = [9, 3, 6, 1]
    outputs = list(engine.stream([[first] for first in range(4)], [sampling(length) for length in lengths]))
    assert [output.index for output in outputs] == [3, 1, 2, 0]
    assert [len(output.completions[0].token_ids) for output in outputs] == [1, 3, 6, 9]


def test_a_stream_checks_its_prompts_when_called(engine: RolloutEngine) -> None:
    with pytest.raises(PromptError):
        engine.stream([[1], []])
    engine.pause()
    with pytest.raises(EngineStateError):
        engine.stream([[1]])


@pytest.mark.parametrize("yielded", [0, 1, 2])
def test_closing_a_stream_early_aborts_its_own_and_no_others(yielded: int, engine: RolloutEngine) -> None:
    other = engine.submit([9], sampling(12), request_id="other")
    stream = engine.stream([[first] for first in range(3)], [sampling(length) for length in (2, 4, 30)])
    for _ in range(yielded):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    stats = engine.stats()
    assert stats.running + stats.waiting == (0 if other.ended else 1)
    assert [request.request_id for request in run(engine, other)] == ["other"]
    assert len(other.completions[0].token_ids) == 12
    assert engine.stats().pages_held == 0


def test_a_stream_that_is_dropped_without_a_step_leaves_nothing(engine: RolloutEngine) -> None:
    stream = engine.stream([[1], [2]], sampling())
    del stream
    assert engine.stats().waiting == engine.stats().running == 0


def test_requests_of_others_that_end_during_a_stream_are_handed_out_once(engine: RolloutEngine) -> None:
    others = [engine.submit([first], sampling(2 + first)) for first in range(2)]
    outputs = list(engine.stream([[7], [8]], sampling(6)))
    assert len(outputs) == 2
    assert all(other.ended for other in others)
    assert {request.request_id for request in engine.step()} == {other.request_id for other in others}
    assert engine.step() == []


def test_stepping_by_hand_inside_a_stream(engine: RolloutEngine) -> None:
    """`step` may hand the stream's requests out, and the stream must not wait for them then."""
    other = engine.submit([9], sampling(3))
    handed_out, indices = [], []
    for output in engine.stream([[first] for first in range(3)], [sampling(n) for n in (1, 3, 5)]):
        indices.append(output.index)
        for _ in range(10):
            handed_out += engine.step()
    assert sorted(indices) == [0, 1, 2]
    assert other in [*handed_out, *engine.step()]


def test_generating_and_scoring_inside_a_stream(engine: RolloutEngine) -> None:
    indices = []
    for output in engine.stream([[first] for first in range(3)], [sampling(n) for n in (1, 3, 5)]):
        indices.append(output.index)
        (inner,) = engine.generate([[20, 21]], sampling(9))
        assert len(inner.completions[0].token_ids) == 9
        (scores,) = engine.score([[20, 21]], inner.completions)
        np.testing.assert_allclose(scores, inner.completions[0].logprobs, atol=2e-4)
    assert sorted(indices) == [0, 1, 2]


def test_two_streams_side_by_side(engine: RolloutEngine) -> None:
    """What ends while the other is stepped is not lost: each yields all of its own."""
    first = engine.stream([[1], [2]], [sampling(n) for n in (4, 9)])
    second = engine.stream([[4], [5]], [sampling(n) for n in (1, 2)])
    pairs = list(zip(first, second, strict=True))
    assert [output.index for output, _ in pairs] == [0, 1]
    assert [output.index for _, output in pairs] == [0, 1]


def test_a_stream_hands_on_what_failed(engine: RolloutEngine) -> None:
    stream = engine.stream([[1], [2]], [sampling(2), sampling(20)])
    next(stream)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("broken")

    engine._core.executor.run = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(RequestFailedError, match="broken"):
        next(stream)
    assert engine.stats().running == 0
