"""SamplingParams are checked at once and as a whole, and the samples' seeds are derived as specified."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

from rollout_spec import RolloutError, SamplingParams
from rollout_spec.errors import ConfigError
from rollout_spec.sampling import derive_seed
from tests.helpers import plain_noise

NOT_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, "1", None, True, [1.0]]
NOT_COUNTS: list[Any] = [1.0, "1", None, True, math.nan]

OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [-0.1, *NOT_NUMBERS],
    "top_p": [0.0, -0.5, 1.0001, *NOT_NUMBERS],
    "min_p": [-0.1, 1.1, *NOT_NUMBERS],
    "repetition_penalty": [0.0, -1.0, *NOT_NUMBERS],
    "presence_penalty": NOT_NUMBERS,
    "frequency_penalty": NOT_NUMBERS,
    "top_k": [-1, *NOT_COUNTS],
    "max_tokens": [0, -1, *NOT_COUNTS],
    "min_tokens": [-1, 257, *NOT_COUNTS],
    "n": [0, -2, *NOT_COUNTS],
    "seed": [-1, 2**63, 1.0, "1", True],
    "ignore_eos": [1, None, "yes"],
    "bad_token_ids": [[-1], [1, None], ["a"], 5, [1.5], "12"],
    "stop_token_ids": [[-1], [None], 5, [2.5], "12"],
    "stop": ["", ["a", ""], [1], 5, [None]],
    "logit_bias": [
        {-1: 1.0},
        {1: math.nan},
        {1: math.inf},
        {1: -math.inf},
        {"a": 1},
        {1: "b"},
        [1, 2],
        {1.5: 1},
    ],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OUT_OF_RANGE.items() for value in values], ids=repr
)
def test_a_value_out_of_range_raises_at_once_and_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as raised:
        SamplingParams(**{name: value})
    assert isinstance(raised.value, ConfigError)
    assert isinstance(raised.value, RolloutError)


IN_RANGE: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1, 100.0],
    "top_p": [1, 1.0, 1e-9],
    "min_p": [0, 1.0],
    "repetition_penalty": [1e-3, 5],
    "presence_penalty": [-2.0, 3],
    "frequency_penalty": [-2.0, 3],
    "top_k": [0, 10**6],
    "max_tokens": [1, 10**6],
    "min_tokens": [0, 256],
    "n": [1, 64],
    "seed": [None, 0, 2**63 - 1],
    "bad_token_ids": [(), [1, 2], np.array([3])],
    "stop_token_ids": [None, (), {1, 2}, np.array([3])],
    "stop": ["x", [], ["x", "yy"], ("x",)],
    "logit_bias": [None, {}, {0: 1, np.int32(5): -2.5}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in IN_RANGE.items() for value in values], ids=repr
)
def test_the_bounds_themselves_are_in_range(name: str, value: Any) -> None:
    SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e-40),
        ("top_k", 2**31),
        ("repetition_penalty", 1e-46),
        ("repetition_penalty", 1e39),
        ("presence_penalty", 1e39),
        ("frequency_penalty", -1e39),
        ("logit_bias", {1: 1e39}),
    ],
    ids=repr,
)
def test_values_that_the_device_cannot_hold_are_refused_too(name: str, value: Any) -> None:
    """float32 and int32: else they fail inside a step, which others run in, or end as infinities and not-a-numbers."""
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})


def test_a_min_tokens_that_the_device_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_tokens"):
        SamplingParams(min_tokens=2**31, max_tokens=2**31)


def test_all_faults_are_listed() -> None:
    with pytest.raises(ConfigError) as raised:
        SamplingParams(
            temperature=-1, top_p=2, top_k=-5, max_tokens=0, seed=-1, stop=[""], logit_bias={-3: 0.0}, n=0
        )
    for name in ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "logit_bias", "n must"):
        assert name in str(raised.value)
    for value in ("-1", "2", "-5"):
        assert value in str(raised.value)


def test_min_tokens_above_max_tokens_is_refused_with_both() -> None:
    with pytest.raises(ConfigError, match=r"min_tokens \(6\) .*max_tokens \(5\)"):
        SamplingParams(min_tokens=6, max_tokens=5)
    SamplingParams(min_tokens=5, max_tokens=5)


def test_they_are_frozen_compare_and_travel() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.0}, stop="x", stop_token_ids=[7])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert params == SamplingParams(temperature=0.5, logit_bias={3: 1.0}, stop=["x"], stop_token_ids=(7,))
    assert params != dataclasses.replace(params, seed=1)
    assert pickle.loads(pickle.dumps(params)) == params


def test_later_changes_of_what_was_passed_are_not_seen() -> None:
    bias, banned, stop = {1: 2.0}, [4], ["x"]
    params = SamplingParams(logit_bias=bias, bad_token_ids=banned, stop=stop)
    bias[9] = 1.0
    banned.append(5)
    stop.append("y")
    assert params == SamplingParams(logit_bias={1: 2.0}, bad_token_ids=[4], stop="x")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"temperature": 0.3, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "stop_token_ids": [1]}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": {1: 1.0}}, True),
        ({"bad_token_ids": [1]}, True),
        ({"min_tokens": 1}, True),
    ],
    ids=str,
)
def test_tables_are_needed_only_by_what_changes_logits(changes: dict[str, Any], expected: bool) -> None:
    assert SamplingParams(**changes).changes_logits == expected


# Seeds


def test_sample_zero_has_the_requests_own_seed() -> None:
    for seed in (0, 1, 12345, 2**63 - 1):
        assert derive_seed(seed, 0) == seed


def test_derived_seeds_are_those_of_the_specification() -> None:
    # SplitMix64 from state 0 gives 0xE220A8397B1DCDAF first; a seed keeps 63 of the bits.
    assert derive_seed(0, 1) == 0xE220A8397B1DCDAF & (2**63 - 1)
    rng = np.random.default_rng(0)
    for seed in [0, 1, 2**63 - 1, *(int(seed) for seed in rng.integers(2**63, size=20))]:
        for sample in (0, 1, 2, 77, 10**6):
            assert derive_seed(seed, sample) == plain_noise.derive_seed(seed, sample)


def test_derived_seeds_are_in_range_and_all_different() -> None:
    seeds = {derive_seed(seed, sample) for seed in range(60) for sample in range(60)}
    assert len(seeds) == 60 * 60
    assert all(0 <= seed < 2**63 for seed in seeds)
