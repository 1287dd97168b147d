"""Paused, asleep and closed engines: what they refuse, and what they keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rollout_spec import RolloutEngine
from rollout_spec.errors import (
    EngineStateError,
)
from tests.helpers.engines import new_engine
from tests.rollout_spec.watched_engine import MODEL, SHAPE, run, sampling, tokens_of

VERBS: dict[str, Callable[[RolloutEngine], Any]] = {
    "generate": lambda engine: engine.generate([[1]], sampling(1)),
    "stream": lambda engine: list(engine.stream([[1]], sampling(1))),
    "score": lambda engine: engine.score([[1]], [[2]]),
    "warm_up": lambda engine: engine.warm_up(),
    "step": lambda engine: engine.step(),
    "update_weights": lambda engine: engine.update_weights(MODEL.params),
    "submit": lambda engine: engine.submit([1], sampling(1)),
    "abort": lambda engine: engine.abort(),
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "sleep": lambda engine: engine.sleep(),
    "wake_up": lambda engine: engine.wake_up(),
}
REFUSED = {
    "paused": ("resume", ["generate", "stream", "score", "warm_up"]),
    "asleep": ("wake_up", ["generate", "stream", "score", "warm_up", "step"]),
    "closed": ("closed", list(VERBS)),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("state", REFUSED)
def test_what_each_state_refuses_and_what_it_does_not(state: str, verb: str, engine: RolloutEngine) -> None:
    {"paused": engine.pause, "asleep": engine.sleep, "closed": engine.close}[state]()
    word, refused = REFUSED[state]
    if verb in refused:
        with pytest.raises(RuntimeError, match=word) as raised:
            VERBS[verb](engine)
        assert isinstance(raised.value, EngineStateError)
    else:
        VERBS[verb](engine)


def test_pausing_keeps_requests_where_they_are(engine: RolloutEngine) -> None:
    (expected,) = engine.generate([[1, 2]], sampling(12))
    request = engine.submit([1, 2], sampling(12))
    engine.step()
    engine.step()
    engine.pause()
    engine.pause()
    late = engine.submit([3], sampling(2))
    held = engine.stats().pages_held
    assert [engine.step() for _ in range(5)] == [[]] * 5
    assert engine.stats().pages_held == held > 0
    engine.resume()
    run(engine, request, late)
    assert tokens_of(request.completions[0]) == tokens_of(expected.completions[0])
    assert engine.stats().preemptions == 0


def test_aborts_while_paused_or_asleep_are_handed_out(engine: RolloutEngine) -> None:
    request, other = engine.submit([1, 2], sampling(12)), engine.submit([3], sampling(12))
    engine.step()
    engine.pause()
    engine.abort([request.request_id])
    assert engine.step() == [request]
    engine.sleep()
    engine.abort([other.request_id])
    engine.wake_up()
    assert engine.step() == [other]
    assert engine.stats().pages_held == 0


def test_requests_submitted_while_asleep_run_afterwards(engine: RolloutEngine) -> None:
    (expected,) = engine.generate([[1, 2]], sampling(6))
    engine.sleep()
    request = engine.submit([1, 2], sampling(6))
    engine.wake_up()
    run(engine, request)
    assert tokens_of(request.completions[0]) == tokens_of(expected.completions[0])


def test_sleeping_deeply_moves_weights_to_the_host_and_back(engine: RolloutEngine) -> None:
    engine.sleep()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(engine.params))
    engine.sleep(level=2)
    engine.sleep()
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(engine.params))
    engine.wake_up()
    engine.wake_up()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(engine.params))
    jax.tree.map(np.testing.assert_array_equal, engine.params, MODEL.params)


def test_an_engine_sleeps_paused_and_wakes_up_paused(engine: RolloutEngine) -> None:
    engine.pause()
    engine.sleep()
    engine.wake_up()
    with pytest.raises(EngineStateError, match="resume"):
        engine.generate([[1]])
    engine.resume()
    engine.generate([[1]], sampling(1))


def test_with_closes_also_after_an_error() -> None:
    made = new_engine(MODEL, SHAPE)
    with contextlib.suppress(ZeroDivisionError), made:
        request = made.submit([1], sampling(20))
        raise ZeroDivisionError
    assert isinstance(request.error, EngineStateError)
    with pytest.raises(EngineStateError, match="closed"):
        made.step()


def test_history_needs_a_drafter(engine: RolloutEngine, tmp_path: Path) -> None:
    for call in (engine.save_history, engine.load_history):
        with pytest.raises(EngineStateError, match="drafting is off"):
            call(tmp_path / "history")
