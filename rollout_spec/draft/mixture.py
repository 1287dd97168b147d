"""From counts to one probability a token: experts, mixed with weights learnt online.

An expert gives the token x, which followed the context c(x) times of c in all as far as it knows,

    p_e(x) = c(x) / (c + DISCOUNT),

and the mixture is p(x) = sum_e w_e p_e(x) over the experts that have seen their context, the weights summing to one.
The weight of an expert depends on how often it has seen the context and how sure it is (`sureness`), all of them on
how long a context the group has seen. Once the token x that came is known, each weight moves towards its expert's
share of p(x), which is expectation maximisation an example at a time:

    w_e <- (1 - RATE) w_e + RATE w_e p_e(x) / p(x).

One more expert, NOBODY, gives every token FLOOR, so that weight can also move to "none of these".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled
from .counts import ONE
from .evidence import EXPERTS, PLAIN_SHAPES, Collected, Evidence, candidate

SURENESSES = 9
NOBODY = EXPERTS * SURENESSES
WEIGHTS = NOBODY + 1
BUCKETS = PLAIN_SHAPES + 1

DISCOUNT = np.float32(0.1 * ONE)
FLOOR = np.float32(1e-4)
RATE = np.float32(0.03)
LEAST_WEIGHT = np.float32(1e-6)


def initial_weights() -> NDArray[np.float32]:
    """float32[BUCKETS, WEIGHTS]; a row for each number of shapes that match in the group."""
    return np.ones((BUCKETS, WEIGHTS), np.float32)


@compiled
def sureness(total: float, most: float) -> int:
    """0 to 8: seen about once, two or three times or more, by: no token, most or all of the followers alike."""
    often = 0 if total < 1.5 * ONE else (1 if total < 3.5 * ONE else 2)
    alike = 2 if most >= np.float32(0.98) * total else (1 if 2 * most > total else 0)
    return often * 3 + alike


@compiled
def mix(weights: NDArray, evidence: Evidence, collected: Collected) -> None:
    """Fills the evidence's probs from what its experts saw."""
    norm = weights[NOBODY]
    for a in range(collected.active):
        column = evidence.experts[a] * SURENESSES + sureness(evidence.totals[a], evidence.most[a])
        evidence.columns[a] = column
        norm += weights[column]
    for a in range(collected.active):
        evidence.scale[a] = weights[evidence.columns[a]] / (norm * (evidence.totals[a] + DISCOUNT))
    for c in range(collected.candidates):
        evidence.probs[c] = 0
    for e in range(collected.entries):
        p = evidence.scale[evidence.entry_active[e]] * evidence.entry_count[e]
        evidence.probs[evidence.entry_candidate[e]] += p


@compiled
def reward(weights: NDArray, evidence: Evidence, collected: Collected, token: int) -> None:
    """Moves the weights that `mix` used, now that `token` is what came."""
    came = candidate(evidence, collected.candidates, token, False)
    norm = weights[NOBODY]
    for a in range(collected.active):
        norm += weights[evidence.columns[a]]
    by_nobody = weights[NOBODY] / norm * FLOOR
    given = by_nobody + (evidence.probs[came] if came >= 0 else np.float32(0))
    keep = 1 - RATE
    weights[NOBODY] = max(LEAST_WEIGHT, keep * weights[NOBODY] + RATE * norm * by_nobody / given)
    for a in range(collected.active):
        weights[evidence.columns[a]] *= keep
    if came >= 0:
        for e in range(collected.entries):
            if evidence.entry_candidate[e] == came:
                a = evidence.entry_active[e]
                share = evidence.scale[a] * evidence.entry_count[e] / given
                weights[evidence.columns[a]] += RATE * norm * share
    for a in range(collected.active):
        weights[evidence.columns[a]] = max(LEAST_WEIGHT, weights[evidence.columns[a]])
