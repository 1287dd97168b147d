"""The plain sampler on rows worked out by hand, and its draws against the distribution it names."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tests.helpers.plain_sampler import PlainSampling, draw, filter_kept, filtered_logits, penalise

PROBABILITIES = np.array([0.4, 0.3, 0.15, 0.1, 0.05])


def test_penalties_apply_in_the_order_of_the_specification() -> None:
    sampling = PlainSampling(
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias={2: 3.0, 4: 1.0},
        bad_token_ids=(4,),
    )
    logits = np.array([2.0, -2.0, 1.0, 5.0, 1.0, 7.0])
    processed = penalise(logits, sampling, prompt=[0, 1], output=[2, 2, 1], masked=[5])
    np.testing.assert_allclose(processed, [1.0, -4.0 - 0.75, 0.5 - 1.25 + 3.0, 5.0, -np.inf, -np.inf])
    assert logits[0] == 2.0, "the caller's row must stay as it was"


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (PlainSampling(), [True] * 5),
        (PlainSampling(top_k=2), [True, True, False, False, False]),
        (PlainSampling(top_k=99), [True] * 5),
        (PlainSampling(top_p=0.69), [True, True, False, False, False]),
        (PlainSampling(top_p=0.71), [True, True, True, False, False]),
        (PlainSampling(top_p=1e-6), [True, False, False, False, False]),
        (PlainSampling(min_p=0.3), [True, True, True, False, False]),
        # Of the renormalised two (4/7 and 3/7) the first alone reaches a half.
        (PlainSampling(top_k=2, top_p=0.5), [True, False, False, False, False]),
    ],
)
def test_filters_keep_the_tokens_worked_out_by_hand(sampling: PlainSampling, kept: list[bool]) -> None:
    np.testing.assert_array_equal(filter_kept(np.log(PROBABILITIES), sampling)[0], kept)


def test_ties_at_the_boundary_of_a_filter_are_kept() -> None:
    tied = np.log(np.array([0.4, 0.2, 0.2, 0.2]))
    for sampling in (PlainSampling(top_k=2), PlainSampling(top_p=0.5)):
        assert filter_kept(tied, sampling)[0].all()


def test_kept_mass_is_over_the_whole_vocabulary_at_the_temperature() -> None:
    logits = 2.0 * np.log(PROBABILITIES)
    filtered, mass, _ = filtered_logits(logits, PlainSampling(temperature=2.0, top_k=3))
    assert mass == pytest.approx(0.85)
    assert np.isinf(filtered[3:]).all()


def test_greedy_takes_the_first_of_the_greatest_and_is_certain() -> None:
    result = draw(
        np.array([0.0, 2.0, 2.0, 1.0]),
        PlainSampling(temperature=0.0, top_k=1, top_p=0.1),
        seed=3,
        position=9,
        prompt=[0],
        output=[],
    )
    assert (result.token, result.sampled_logprob, result.kept_mass) == (1, 0.0, 1.0)


@pytest.mark.parametrize("vocabulary", [7, 256, 700])
def test_draws_follow_the_distribution(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(0, 2, vocabulary)
    sampling = PlainSampling(temperature=0.8, min_p=0.02)
    filtered, _, _ = filtered_logits(logits, sampling)
    expected = np.exp(filtered - np.logaddexp.reduce(filtered))
    draws = 3000
    counts = np.zeros(vocabulary)
    for seed in range(draws):
        result = draw(logits, sampling, seed=seed, position=5, prompt=[], output=[])
        counts[result.token] += 1
        assert result.sampled_logprob == pytest.approx(np.log(expected[result.token]))
    kept = expected > 0
    assert counts[~kept].sum() == 0
    common = expected * draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * draws
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chisquare(observed, wanted).pvalue > 1e-4
