"""Part 1, never slower: text that never repeats, with drafting on and off, by number of requests.

Two kinds of it: unrelated prompts sampled at temperature 1.5, and what an untrained model says to prompts of random
token ids. Every round has new seeds, so the history, which grows over the rounds, never helps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.rollouts_play import (
    LONGEST_RANDOM_PROMPT,
    TINY,
    UNTRAINED,
    Bench,
    Play,
    Policy,
    Work,
    identical,
    in_order,
    median_ratio,
    seeds,
    summary,
    untrained,
)
from benchmarks.rollouts_results import goal
from rollout_spec import SamplingParams

TITLE = "Never slower: text that never repeats"
GOAL = 0.97
HOT = 1.5
SHORT_STEPS = 3
"""Times as many tokens where steps are so short that a play would take too little time to measure."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """slots: numbers of requests. tokens: of each completion, at one request; at n, 2/n of it but at least a third.

    texts: which of the two kinds. engine_slots: of the one engine that serves all numbers of requests.
    """

    slots: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rounds: int = 7
    tokens: int = 128
    texts: tuple[str, ...] = ("temperature 1.5", "untrained")
    engine_slots: int = 32


FULL = Settings()
QUICK = Settings(slots=(1, 4, 16), rounds=3, tokens=64, engine_slots=16)
SMOKE = Settings(slots=(1, 2), rounds=2, tokens=8, engine_slots=2)


def measure(settings: Settings, bench: Bench, save: Callable[[str, dict[str, Any]], None]) -> None:
    """A cell for each text and number of requests."""
    for text in settings.texts:
        policy = bench.policy
        if text == "untrained":
            tiny = policy.config == TINY
            policy = untrained(TINY, seed=1) if tiny else untrained(UNTRAINED, seed=1, max_seq_len=448)
        pair = bench.pair(settings.engine_slots, policy=policy)
        numbers = seeds(1 if text == "untrained" else 2)
        for requests in settings.slots:
            tokens = max(settings.tokens // 3, min(settings.tokens, 2 * settings.tokens // requests))
            if policy is not bench.policy:
                tokens = min(SHORT_STEPS * tokens, policy.max_seq_len - LONGEST_RANDOM_PROMPT)
            played: dict[str, list[Play]] = {name: [] for name in pair}
            for subject in pair.values():
                subject.forget()
                subject.prime(_works(policy, requests, tokens, numbers))
            for number in range(settings.rounds):
                works = _works(policy, requests, tokens, numbers)
                for name in in_order(list(pair), number):
                    played[name].append(pair[name].play(works))
            ratio = median_ratio(played["speculative"], played["plain"])
            save(
                f"{text}, {requests} requests",
                {
                    "text": text,
                    "slots": requests,
                    "subjects": {name: summary(plays) for name, plays in played.items()},
                    "same": identical(played),
                    "goals": [goal("speculative / plain", ratio, GOAL)],
                },
            )


def _works(policy: Policy, requests: int, tokens: int, numbers: Iterator[int]) -> list[Work]:
    prompts = policy.prompts["math"]
    return [
        Work(
            prompts[index % len(prompts)],
            SamplingParams(temperature=HOT, max_tokens=tokens, ignore_eos=True, seed=next(numbers)),
            ("math", index),
        )
        for index in range(requests)
    ]
