"""Whether counts follow exact probabilities, by Pearson's chi-square test."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import stats

LEAST_EXPECTED = 5.0  # cells expected less often are taken together, as the test's approximation asks

# Seeds are fixed, so a test passes always or never; below this, never is what a correct sampler would do
# once in ten thousand choices of the seeds.
LEAST_P_VALUE = 1e-4


def chi_square_p_value(counts: npt.ArrayLike, probabilities: npt.ArrayLike) -> float:
    """The p-value of counts int[N] under probabilities float[N]; 0 if something impossible was counted."""
    counts, probabilities = np.asarray(counts), np.asarray(probabilities, np.float64)
    total = counts.sum()
    if counts[probabilities == 0].any():
        return 0.0
    order = np.argsort(-probabilities)
    expected = probabilities[order] * total
    common = int((expected >= LEAST_EXPECTED).sum())
    # The rare cells become one; if they are still too few together, the rarest common cell joins them.
    while 0 < expected[common:].sum() < LEAST_EXPECTED and common > 0:
        common -= 1
    observed = np.append(counts[order][:common], counts[order][common:].sum())
    wanted = np.append(expected[:common], expected[common:].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) < 2:
        return 1.0
    return float(stats.chisquare(observed, wanted * total / wanted.sum()).pvalue)
