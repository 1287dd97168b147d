"""Batches that change while they run, so that no fixed number of draft nodes is right throughout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.rollouts_play import Policy, Work, seeds
from rollout_spec import SamplingParams

Batch = tuple[int, list[Work], list[Work]]
"""Slots, the requests measured, and those that make the history."""

_SHORTEST_SHARE = 1 / 16
_TEMPERATURE = 0.6
_HOT = 1.5


def long_tail(policy: Policy, max_tokens: int) -> Batch:
    """16 requests for 16 slots, lengths in geometric progression from an eighth of `max_tokens` to twice it.

    A second epoch of 4 math prompts at temperature 0.6.
    """
    slots, numbers = 16, seeds(5)
    lengths = np.geomspace(2 * max_tokens * _SHORTEST_SHARE, 2 * max_tokens, slots).astype(int).tolist()
    prompts = policy.prompts["math"][:4]

    def work(number: int, tokens: int) -> Work:
        sampling = SamplingParams(
            temperature=_TEMPERATURE, max_tokens=tokens, ignore_eos=True, seed=next(numbers)
        )
        return Work(prompts[number % len(prompts)], sampling, ("math", number % len(prompts)))

    history = [work(number, 2 * max_tokens) for number in range(8 * len(prompts))]
    return slots, [work(number, tokens) for number, tokens in enumerate(lengths)], history


def novel_then_repetitive(policy: Policy, max_tokens: int) -> Batch:
    """8 slots: 8 requests at temperature 1.5, then 16 greedy ones whose completions the history knows."""
    slots, numbers = 8, seeds(6)
    prompts = policy.prompts["math"]
    novel = [
        Work(
            prompts[slots + number],
            SamplingParams(temperature=_HOT, max_tokens=max_tokens, ignore_eos=True, seed=next(numbers)),
            ("math", slots + number),
        )
        for number in range(slots)
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    known = [Work(prompts[number], greedy, ("math", number)) for number in range(slots)]
    return slots, novel + known + known, known


CHANGING: dict[str, Callable[[Policy, int], Batch]] = {
    "a long tail": long_tail,
    "novel, then repetitive": novel_then_repetitive,
}
