"""The loop on a pool learns from each token against its own version, and from none that is too old."""

from __future__ import annotations

import numpy as np

from examples.grpo_ray import versions_of
from examples.trainer import make_rows
from rollout_spec import Completion, RolloutOutput


def output(versions: list[list[int]]) -> RolloutOutput:
    def completion(of: list[int]) -> Completion:
        count = len(of)
        logprobs = -np.arange(1, count + 1, dtype=np.float32)
        return Completion(
            token_ids=np.arange(count, dtype=np.int32),
            text=None,
            logprobs=logprobs,
            sampled_logprobs=logprobs,
            kept_mass=np.ones(count, np.float32),
            finish_reason="length",
            stop_token=None,
            weight_versions=np.array(of, np.int32),
            seed=0,
        )

    return RolloutOutput(np.array([7, 8], np.int32), [completion(of) for of in versions], "group")


def test_tokens_that_are_too_old_are_context_only() -> None:
    made = output([[1, 1, 2, 3], [3, 3]])
    (rows,) = make_rows([made], [[0.0, 1.0]], 2, [8], oldest_version=2)
    by_length = sorted(rows.sampled.sum(axis=1).tolist())
    assert by_length == [2, 2]
    (everything,) = make_rows([made], [[0.0, 1.0]], 2, [8])
    assert sorted(everything.sampled.sum(axis=1).tolist()) == [2, 4]
    np.testing.assert_array_equal(rows.behaviour_logprobs, everything.behaviour_logprobs)
    assert [versions.tolist() for versions in versions_of([made])] == [[1, 1, 2, 3], [3, 3]]
