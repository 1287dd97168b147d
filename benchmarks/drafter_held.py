"""A drafter that holds a given number of tokens of rollout-like text, and text to go on with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.drafter_measure import cpu_seconds_of
from benchmarks.drafter_text import LENGTH, VOCABULARY, RolloutText
from benchmarks.replay import ReplayDrafter
from rollout_spec.draft import DraftConfig, TrieDrafter

SAMPLES = 8
EPOCHS = 2
SPARE = 1.3
"""Capacity over the tokens held, so that all of them are held."""

MOST_GROWTH = 1.2
"""A drafter that holds more than this times the tokens it is measured with is filled anew."""


class LearningDrafter(ReplayDrafter, Protocol):
    """A drafter that says how much it holds."""

    @property
    def memory_bytes(self) -> int: ...

    @property
    def tokens_learnt(self) -> int: ...


D = TypeVar("D", bound=LearningDrafter)


def make_trie(tokens: int) -> TrieDrafter:
    """A drafter with room for `tokens` tokens of text and some more."""
    return TrieDrafter(DraftConfig(capacity_tokens=int(SPARE * tokens)))


@dataclass(frozen=True, eq=False)
class Sample:
    """A completion to learn or to go on with, of a prompt of its group. prompt: int32[P]. tokens: int32[T]."""

    group_id: Hashable
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]


def samples_of(text: RolloutText, epoch: int, sample: int, name: str = "held") -> list[Sample]:
    """One completion of every prompt."""
    completions = text.completions(epoch, sample)
    return [Sample((name, number), text.prompts[number], tokens) for number, tokens in enumerate(completions)]


def endless(text: RolloutText, name: str = "held") -> Iterator[Sample]:
    """Completions in the order of training: every epoch has `SAMPLES` of each prompt."""
    epoch = 0
    while True:
        for sample in range(SAMPLES):
            yield from samples_of(text, epoch, sample, name)
        epoch += 1


def ever_new(*, seed: int = 1000) -> Iterator[Sample]:
    """Two completions of each of ever new prompts."""
    for number in itertools.count(seed):
        text = RolloutText(64, seed=number)
        for sample in range(2):
            yield from samples_of(text, 0, sample, f"new {number}")


def random_tokens(*, seed: int = 0) -> Iterator[Sample]:
    """Uniformly random tokens without end: text in which nothing comes twice."""
    random = np.random.default_rng(seed)
    for number in itertools.count():
        tokens = random.integers(0, VOCABULARY, LENGTH, np.int32)
        yield Sample(("random", number), tokens[:1], tokens)


def learn(drafter: LearningDrafter, sample: Sample) -> float:
    """A whole request, from start to finish; returns the CPU seconds that `extend` took."""
    drafter.start("learning", sample.prompt, sample.group_id)
    seconds = cpu_seconds_of(lambda: drafter.extend("learning", sample.tokens))
    drafter.finish("learning")
    return seconds


def fill(drafter: LearningDrafter, samples: Iterator[Sample], tokens: int) -> float:
    """Learns until the drafter has learnt `tokens` tokens; returns the CPU seconds that `extend` took."""
    seconds = 0.0
    while (missing := tokens - drafter.tokens_learnt) > 0:
        sample = next(samples)
        seconds += learn(drafter, Sample(sample.group_id, sample.prompt, sample.tokens[:missing]))
    return seconds


class Held(Generic[D]):
    """A drafter that has learnt `tokens` tokens: `EPOCHS` epochs of `SAMPLES` completions a prompt.

    make: makes the drafter, given the tokens it is to hold. name: of the drafter, in tables. fill_s: CPU seconds that
    `extend` took to get there.
    """

    def __init__(self, tokens: int, make: Callable[[int], D], name: str = "trie") -> None:
        self.name = name
        self._make = make
        self.tokens = tokens
        self.text = RolloutText(max(1, tokens // (EPOCHS * SAMPLES * LENGTH)))
        self._random = np.random.default_rng(tokens)
        self._epochs = EPOCHS  # drawn from so far
        self._new_prompts = 0
        self.drafter, self.fill_s = self._filled()

    def _filled(self) -> tuple[D, float]:
        drafter = self._make(self.tokens)
        return drafter, fill(drafter, endless(self.text), self.tokens)

    def sibling(self, tokens: int) -> Held[D]:
        """Another of the same kind that holds `tokens` tokens."""
        return Held(tokens, self._make, self.name)

    def refill(self) -> None:
        """Starts anew with what was held at first, if too much was learnt since."""
        if self.drafter.tokens_learnt > MOST_GROWTH * self.tokens:
            self.drafter, _ = self._filled()

    def of_held_prompts(self, count: int) -> list[Sample]:
        """Further completions of prompts that are held, drawn at random: a later epoch."""
        drawn: list[Sample] = []
        while len(drawn) < count:
            self._epochs += 1
            for sample in range(SAMPLES):
                drawn += samples_of(self.text, self._epochs, sample)
                if len(drawn) >= count:
                    break
        return [drawn[i] for i in self._random.permutation(len(drawn))[:count]]

    def of_new_prompts(self, count: int) -> list[Sample]:
        """First completions of prompts that were never seen."""
        self._new_prompts += 1
        text = RolloutText(count, seed=1000 + self._new_prompts)
        return samples_of(text, 0, 0, f"new {self._new_prompts}")


class Batch:
    """Requests in the middle of completions of held prompts, for all of which the whole budget is proposed.

    Of twice as many candidates the first that get `nodes` nodes are taken; should they be too few, others fill up.
    """

    def __init__(self, held: Held[Any], size: int, nodes: int) -> None:
        self._drafter = held.drafter
        candidates = held.of_held_prompts(2 * size)
        for number, sample in enumerate(candidates):
            self._drafter.start(("batch", number), sample.prompt, sample.group_id)
            self._drafter.extend(("batch", number), sample.tokens[: 32 + 37 * number % 96])
        names: list[Hashable] = [("batch", number) for number in range(len(candidates))]
        sizes = [len(tree) for tree in self._drafter.propose(names, [nodes] * len(names))]
        by_size = sorted(range(len(names)), key=lambda number: -min(sizes[number], nodes))
        self.request_ids: Sequence[Hashable] = [names[number] for number in by_size[:size]]
        self.budgets = [nodes] * size
        for number in by_size[size:]:
            self._drafter.finish(names[number])

    def propose(self) -> int:
        """One call for all requests; returns how many nodes were proposed."""
        return sum(map(len, self._drafter.propose(self.request_ids, self.budgets)))

    def finish(self) -> None:
        for name in self.request_ids:
            self._drafter.finish(name)
