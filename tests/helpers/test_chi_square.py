"""The chi-square helper accepts what follows the probabilities and refuses what does not."""

from __future__ import annotations

import numpy as np

from tests.helpers.chi_square import chi_square_p_value


def test_p_values_of_true_counts_are_uniform_and_of_false_ones_tiny() -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.full(60, 0.3))
    values = [chi_square_p_value(rng.multinomial(2000, probabilities), probabilities) for _ in range(300)]
    assert 0.4 < np.mean(values) < 0.6
    assert np.mean(np.array(values) < 0.05) < 0.1
    wrong = 0.9 * probabilities + 0.1 / 60
    assert chi_square_p_value(rng.multinomial(2000, wrong), probabilities) < 1e-6


def test_impossible_and_certain_outcomes() -> None:
    assert chi_square_p_value([99, 1], [1.0, 0.0]) == 0.0
    assert chi_square_p_value([100, 0], [1.0, 0.0]) == 1.0
