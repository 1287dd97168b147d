"""How many draft nodes a step verifies: what maximises expected tokens per second.

A node is worth its calibrated probability of being accepted. A step costs what steps of its compiled size were
measured to cost, so the sizes are the only places where the cost curve rises, and a size once paid for is
filled with the likeliest nodes of all requests. Nothing drafted is an option like the others, and the only one that
is spared the host's time for drafting.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_WINDOW = 15  # recent host times; their median is robust to outliers
_FRESH_STEPS = 256  # a measurement older than this many steps is doubted
_ENOUGH = 3  # measurements of the plain step before anything is compared to it
_TOKENS_THAT_DOUBLE_A_STEP = 16.0  # assumed until two sizes are measured
_SPEED_STEPS = 5  # steps whose median says how fast the machine is now
_RECENT = 5  # measurements of a size whose median it follows
_LEAST_STEP, _MOST_STEP, _STALE_STEPS = 0.05, 0.5, 64  # how far it follows: as far as it is stale
_LEAST_GAIN = 1.02  # over the step without drafts, for drafts to be verified at all


class Sized(Hashable, Protocol):
    """A compiled size of a step."""

    @property
    def tokens(self) -> int: ...

    @property
    def sequences(self) -> int: ...


@dataclass
class _Measured:
    """What is known of one size."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Seconds of the last measurements, at speed 1 and with nothing cached, as is `seconds`."""
    seconds: float = 0.0
    count: int = 0
    last_step: int = 0


class StepTimes:
    """Seconds that steps of each size take, learnt while running.

    A step takes speed * (1 + growth * cached tokens) * (seconds of its size). `speed` follows at once, as the median
    of the last few steps' measured over expected seconds: it holds what slows all sizes alike for a while, such as
    other work on the machine. What sizes take beside each other is learnt slowly, but for those not measured lately.
    So a size that was measured while the machine was busy doesn't look slow beside one that wasn't. The growth is one
    of the steps for up to so many sequences, and learnt from `compare_cached`.
    """

    def __init__(self) -> None:
        self.speed = 1.0
        self.growth: dict[int, float] = {}
        """Share that each cached token adds to a step for up to so many sequences."""
        self._steps = 0
        self._measured: dict[Sized, _Measured] = {}
        self._ratios: deque[float] = deque(maxlen=_SPEED_STEPS)

    def record(self, size: Sized, seconds: float, cached: int = 0) -> None:
        """A step of this size, over so many cached tokens of all its sequences, was measured (without compilation)."""
        self._steps += 1
        measured = self._measured.setdefault(size, _Measured())
        alone = seconds / self._grown(size, cached)
        if measured.count:
            self._ratios.append(alone / measured.seconds)
            self.speed = median(self._ratios)
        age, measured.last_step = self._steps - measured.last_step, self._steps
        if age > _STALE_STEPS:
            measured.recent.clear()
        measured.count += 1
        measured.recent.append(alone / self.speed)
        typical = median(measured.recent)
        if measured.count <= _RECENT:
            measured.seconds = typical
        else:
            step = min(max(age / _STALE_STEPS, _LEAST_STEP), _MOST_STEP)
            measured.seconds *= (typical / measured.seconds) ** step

    def compare_cached(self, sequences: int, few: int, many: int, ratios: Sequence[float]) -> None:
        """Steps for up to `sequences` took `ratios` times as long with `many` cached tokens as with `few`."""
        ratio = max(1.0, median(ratios))
        self.growth[sequences] = (ratio - 1.0) / max(many - ratio * few, 1.0)

    def _grown(self, size: Sized, cached: int) -> float:
        return 1.0 + self.growth.get(size.sequences, 0.0) * cached

    def knows(self, size: Sized) -> bool:
        """Whether steps of this size were measured lately, and often enough to rely on."""
        measured = self._measured.get(size)
        return measured is not None and measured.count >= _ENOUGH and self._is_fresh(measured)

    def _is_fresh(self, measured: _Measured) -> bool:
        return self._steps - measured.last_step < _FRESH_STEPS

    def expected(self, size: Sized, cached: int = 0) -> float:
        """Seconds of a step of this size over so many cached tokens.

        Measured if that was lately. Otherwise no more than what the sizes around it suggest: a size that once
        looked slow, perhaps because the machine was busy, would never be tried again. Before any
        measurement the unit is arbitrary, as only ratios count.
        """
        measured = self._measured.get(size)
        if measured is not None and self._is_fresh(measured):
            seconds = measured.seconds
        else:
            seconds = self._interpolated(size)
            seconds = seconds if measured is None else min(seconds, measured.seconds)
        return self.speed * self._grown(size, cached) * min(seconds, self._limit(size))

    def _limit(self, size: Sized) -> float:
        """What some larger size takes; smaller ones are not slower."""
        return min(
            [
                one.seconds
                for other, one in self._measured.items()
                if other.tokens > size.tokens and other.sequences == size.sequences
            ],
            default=math.inf,
        )

    def _interpolated(self, size: Sized) -> float:
        """From the sizes around it for as many sequences, or else from any."""
        others = [other for other in self._measured if other != size]
        others = [other for other in others if other.sequences == size.sequences] or others
        below = max((o for o in others if o.tokens <= size.tokens), key=lambda o: o.tokens, default=None)
        above = min((o for o in others if o.tokens >= size.tokens), key=lambda o: o.tokens, default=None)
        nearest = below if below is not None else above
        if nearest is None:
            return self._measured[size].seconds if size in self._measured else _assumed(size.tokens)
        seconds = self._measured[nearest].seconds
        if below is not None and above is not None and below.tokens < above.tokens:
            share = (size.tokens - below.tokens) / (above.tokens - below.tokens)
            return (1 - share) * seconds + share * self._measured[above].seconds
        return seconds * _assumed(size.tokens) / _assumed(nearest.tokens)


def _assumed(tokens: int) -> float:
    return 1.0 + tokens / _TOKENS_THAT_DOUBLE_A_STEP


class HostTimes:
    """Seconds that a step costs besides the device, with and without drafts: medians of the last ones."""

    def __init__(self) -> None:
        self._recent = {drafted: deque[float](maxlen=_WINDOW) for drafted in (False, True)}

    def record(self, drafted: bool, seconds: float) -> None:
        """drafted: whether the drafter was asked."""
        self._recent[drafted].append(seconds)

    def expected(self, drafted: bool) -> float:
        """0 until known."""
        plain = median(self._recent[False]) if self._recent[False] else 0.0
        if not drafted:
            return plain
        return max(plain, median(self._recent[True])) if self._recent[True] else plain


class LookAheadTimes:
    """Seconds that the policy's heads add to a step in which they draft for the next, by the sequences of its size."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}

    def record(self, sequences: int, seconds: float) -> None:
        """A step took so much longer than one in which they don't."""
        self._recent.setdefault(sequences, deque(maxlen=_WINDOW)).append(max(0.0, seconds))

    def knows(self, sequences: int) -> bool:
        return bool(self._recent.get(sequences))

    def expected(self, sequences: int) -> float:
        """0 until known."""
        recent = self._recent.get(sequences)
        return median(recent) if recent else 0.0


@dataclass(frozen=True)
class StepOption:
    """A size the step could have, the draft nodes that would fit it, and the seconds it is expected to take."""

    size: Sized
    capacity: int
    seconds: float


@dataclass(frozen=True)
class NodeBudget:
    """The option chosen, and the draft nodes of each request, the likeliest ones first."""

    option: StepOption
    nodes: tuple[int, ...]
    expected_tokens: float


def share_nodes(
    probs: Sequence[NDArray[np.float32]], options: Sequence[StepOption], decoding: int
) -> NodeBudget:
    """Chooses an option and each request's number of nodes.

    Args:
        probs: for each request that drafts in this step, its nodes' probabilities, float32[N].
        options: at least one, the first without drafts; of equals the first is chosen.
        decoding: requests that emit a token in this step, whether they draft or not.

    Zero nodes for all is a normal answer: every request emits one token without any. It is also the answer where
    drafts promise less than what measured times may be wrong by.
    """
    values = np.concatenate(probs) if probs else np.empty(0, np.float32)
    order = np.argsort(-values, kind="stable")
    gained = np.concatenate([[0.0], np.cumsum(values[order], dtype=np.float64)])
    best, best_rate, best_count = options[0], _LEAST_GAIN * decoding / options[0].seconds, 0
    for option in options[1:]:
        count = min(option.capacity, len(values))
        rate = (decoding + gained[count]) / option.seconds
        if rate > best_rate:
            best, best_rate, best_count = option, rate, count
    owner = np.repeat(np.arange(len(probs)), [len(p) for p in probs])
    nodes = np.bincount(owner[order[:best_count]], minlength=len(probs))
    return NodeBudget(best, tuple(nodes.tolist()), decoding + float(gained[best_count]))
