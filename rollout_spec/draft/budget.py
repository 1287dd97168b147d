"""How many draft nodes a step verifies: what maximises expected tokens per second.

A node is worth its calibrated probability of being accepted. A step costs what steps of its compiled size were
measured to cost, so the sizes are the only places where the cost curve rises, and a size once paid for is
filled with the likeliest nodes of all requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_WINDOW = 15  # recent measurements of a size; their median is robust to outliers
_FRESH_STEPS = 256  # a measurement older than this many steps is doubted
_IMPLAUSIBLE = 1.2  # times slower than a larger size
_ENOUGH = 3  # measurements of the plain step before anything is compared to it
_TOKENS_THAT_DOUBLE_A_STEP = 16.0  # assumed until two sizes are measured


class Sized(Hashable, Protocol):
    """A compiled size of a step."""

    @property
    def tokens(self) -> int: ...


class StepTimes:
    """Seconds that steps of each size take, learnt while running."""

    def __init__(self) -> None:
        self._steps = 0
        self._recent: dict[Sized, deque[tuple[int, float]]] = {}  # (step, seconds)
        self._median: dict[Sized, float] = {}

    def record(self, size: Sized, seconds: float) -> None:
        """A step of this size was measured (without compilation)."""
        self._steps += 1
        recent = self._recent.setdefault(size, deque(maxlen=_WINDOW))
        recent.append((self._steps, seconds))
        fresh = [value for step, value in recent if self._steps - step < _FRESH_STEPS]
        self._median[size] = float(np.median(fresh))

    def knows(self, size: Sized) -> bool:
        """Whether steps of this size were measured lately, and often enough to rely on."""
        recent = self._recent.get(size)
        if recent is None or len(recent) < _ENOUGH or self._steps - recent[-1][0] >= _FRESH_STEPS:
            return False
        # Slower than larger sizes: rather a disturbed measurement than the truth, until a full window says so.
        implausible = self._median[size] > _IMPLAUSIBLE * self._limit(size)
        return not implausible or len(recent) == _WINDOW

    def _limit(self, size: Sized) -> float:
        """Seconds that some larger size was measured to take."""
        larger = (seconds for other, seconds in self._median.items() if other.tokens > size.tokens)
        return min(larger, default=float("inf"))

    def expected(self, size: Sized) -> float:
        """Seconds of a step of this size: at most what a larger one was measured to take.

        Measured if that was lately. Otherwise no more than what the sizes around it suggest: a size that once
        looked slow, perhaps because the machine was busy, would never be tried again. Before any
        measurement the unit is arbitrary, as only ratios count.
        """
        limit = self._limit(size)
        if size in self._recent and self._steps - self._recent[size][-1][0] < _FRESH_STEPS:
            return min(self._median[size], limit)
        suggested = min(self._interpolated(size), limit)
        return min(suggested, self._median.get(size, suggested))

    def _interpolated(self, size: Sized) -> float:
        others = [other for other in self._median if other != size]
        below = max((o for o in others if o.tokens <= size.tokens), key=lambda o: o.tokens, default=None)
        above = min((o for o in others if o.tokens >= size.tokens), key=lambda o: o.tokens, default=None)
        if below is not None and above is not None and below.tokens < above.tokens:
            share = (size.tokens - below.tokens) / (above.tokens - below.tokens)
            return (1 - share) * self._median[below] + share * self._median[above]
        nearest = below if below is not None else above
        if nearest is None:
            return self._median.get(size, _assumed(size.tokens))
        return self._median[nearest] * _assumed(size.tokens) / _assumed(nearest.tokens)


def _assumed(tokens: int) -> float:
    return 1.0 + tokens / _TOKENS_THAT_DOUBLE_A_STEP


@dataclass(frozen=True)
class StepOption:
    """A size the step could have, and the draft nodes that would fit it."""

    size: Sized
    capacity: int


@dataclass(frozen=True)
class NodeBudget:
    """The size chosen, and the draft nodes of each request, the likeliest ones first."""

    size: Sized
    nodes: tuple[int, ...]
    expected_tokens: float


def share_nodes(
    probs: Sequence[NDArray[np.float32]], options: Sequence[StepOption], times: StepTimes
) -> NodeBudget:
    """Chooses a size and each request's number of nodes.

    Args:
        probs: for each request that decodes in this step, its nodes' probabilities, float32[N].
        options: sizes that fit the step without drafts, at least one; the first is the step without them.
        times: measured step times.

    Zero nodes for all is a normal answer: every request emits one token without any. It is also the answer while
    the step without drafts hasn't been measured lately, so that nothing is compared with a guess.
    """
    if not times.knows(options[0].size):
        return NodeBudget(options[0].size, (0,) * len(probs), float(len(probs)))
    owner = np.concatenate(
        [np.full(len(p), i, np.int32) for i, p in enumerate(probs)] or [np.empty(0, np.int32)]
    )
    values = np.concatenate([np.asarray(p, np.float64) for p in probs] or [np.empty(0)])
    order = np.argsort(-values, kind="stable")
    gained = np.concatenate([[0.0], np.cumsum(values[order])])

    best, best_rate, best_count = options[0], -1.0, 0
    for option in options:
        count = min(option.capacity, len(values))
        rate = (len(probs) + gained[count]) / times.expected(option.size)
        if rate > best_rate:
            best, best_rate, best_count = option, rate, count
    nodes = np.bincount(owner[order[:best_count]], minlength=len(probs))
    return NodeBudget(best.size, tuple(nodes.tolist()), len(probs) + float(gained[best_count]))
