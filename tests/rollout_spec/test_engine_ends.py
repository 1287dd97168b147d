"""A request ends once, however its samples end."""

from __future__ import annotations

import pytest

from tests.rollout_spec.watched_engine import run, sampling, watched_engine


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_samples_that_end_in_the_same_step_end_their_request_once(samples: int) -> None:
    engine = watched_engine()
    requests = [engine.submit([5, 6], sampling(3, n=samples)) for _ in range(3)]
    handed_out = run(engine, *requests)
    assert sorted(map(id, handed_out)) == sorted(map(id, requests))
    outputs = engine.generate([[5, 6]] * 3, sampling(3, n=samples))
    assert [len(output.completions) for output in outputs] == [samples] * 3
    assert engine.stats().requests_finished == 6
