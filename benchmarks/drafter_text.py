"""Text like rollouts, in any amount: many prompts, several samples of each, over epochs. Seeded, all in numpy.

Recorded rollouts are too few to fill a history of ten million tokens, and random tokens are too unlike text. Here

- a document is a chain of phrases; the phrases, and the tokens in them, are drawn by Zipf's law;
- every prompt has a document, whose beginning is the prompt, and its completions are variants of the rest: at a share
  of the places one of a few alternatives, of one to five tokens, is taken, and a share of the tokens is noise;
- one alternative of a place is preferred, and between epochs a share of the places comes to prefer another one.

The shares are by default such that a replay comes out about as one of the recorded workload "hard" (tokens per step,
nodes per step and what epoch 2 gains), for which this text stands in at larger sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_spec.recorded import Recorded, Workload

VOCABULARY = 49_152
PROMPT_LENGTH = 128
LENGTH = 512
"""Tokens of a prompt, and of each completion."""

PHRASES = 20_000
LONGEST_PHRASE = 7
ALTERNATIVES = 4
LONGEST_ALTERNATIVE = 5


@dataclass(frozen=True)
class Variation:
    """How the completions of a prompt differ.

    places: share of the positions at which a place with alternatives begins. noise: share of random tokens.
    preference: probability of a place's preferred alternative; the others share the rest. drift: share of the places
    that prefer another alternative from one epoch to the next, for good.
    """

    places: float = 0.12
    noise: float = 0.035
    preference: float = 0.6
    drift: float = 0.3


EASY = Variation(places=0.04, noise=0.0125)
HARD = Variation()


class Variants:
    """Variants of documents; equal arguments give equal text.

    alternatives: int32[A, documents, length]: the documents, and texts that places are taken from instead.
    """

    def __init__(self, alternatives: NDArray[np.int32], *, seed: int, variation: Variation) -> None:
        self.variation = variation
        self._seed = seed
        self._alternatives = alternatives
        _, documents, length = alternatives.shape
        random = self._random(1)
        starts = random.random((documents, length)) < variation.places
        # Positions from a place's start to its end have its number, the others the number after the last place.
        latest = np.maximum.accumulate(np.where(starts, np.arange(length), -1), axis=1)
        span = random.integers(1, LONGEST_ALTERNATIVE + 1, (documents, length))
        at = np.maximum(latest, 0)
        inside = (latest >= 0) & (np.arange(length) - at < np.take_along_axis(span, at, axis=1))
        numbers = np.cumsum(starts, dtype=np.int32).reshape(documents, length) - 1
        self._places = int(starts.sum())
        self._place = np.where(inside, numbers, self._places)

    def completions(self, epoch: int, sample: int) -> NDArray[np.int32]:
        """int32[documents, length]: a variant of every document."""
        random = self._random(2, epoch, sample)
        count, preferred = len(self._alternatives), self._preferred(epoch)
        other = (preferred + random.integers(1, count, self._places, np.int8)) % count
        chosen = np.append(
            np.where(random.random(self._places) < self.variation.preference, preferred, other), np.int8(0)
        )
        text = np.take_along_axis(self._alternatives, chosen[self._place][None].astype(np.intp), axis=0)[0]
        noisy = random.random(text.shape, np.float32) < self.variation.noise
        text[noisy] = random.integers(0, VOCABULARY, int(noisy.sum()), np.int32)
        return text

    def _preferred(self, epoch: int) -> NDArray[np.int8]:
        """int8[places]: the alternative that each place prefers in an epoch."""
        preferred = np.zeros(self._places, np.int8)
        for number in range(1, epoch + 1):
            random = self._random(3, number)
            moved = random.random(self._places) < self.variation.drift
            step = random.integers(1, len(self._alternatives), self._places, np.int8)
            preferred = np.where(moved, (preferred + step) % len(self._alternatives), preferred)
        return preferred

    def _random(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *purpose])


class RolloutText:
    """Made-up documents of `prompts` prompts, and their completions; equal arguments give equal text.

    prompts: int32[prompts, PROMPT_LENGTH], the prompts' tokens.
    """

    def __init__(self, prompts: int, *, seed: int = 0, variation: Variation = HARD) -> None:
        random = np.random.default_rng([seed, 0])
        phrases = _Phrases(np.random.default_rng(0))  # the language is the same for every seed
        self.prompts = phrases.text(random, prompts * PROMPT_LENGTH).reshape(prompts, PROMPT_LENGTH)
        alternatives = phrases.text(random, ALTERNATIVES * prompts * LENGTH)
        self._variants = Variants(
            alternatives.reshape(ALTERNATIVES, prompts, LENGTH), seed=seed, variation=variation
        )

    def completions(self, epoch: int, sample: int) -> NDArray[np.int32]:
        """int32[prompts, LENGTH]: a sample of every prompt in an epoch."""
        return self._variants.completions(epoch, sample)


def workload(
    name: str,
    prompts: NDArray[np.int32],
    text: Variants | RolloutText,
    *,
    samples: int = 8,
    epochs: int = 2,
) -> Workload:
    """Completions to replay. prompts: int32[P, prompt length], of the documents in their order."""
    recorded = [
        Recorded(epoch, number, sample, prompts[number], tokens)
        for epoch in range(epochs)
        for sample in range(samples)
        for number, tokens in enumerate(text.completions(epoch, sample))
    ]
    return Workload(name, tuple(recorded), np.empty(0, np.int32))


class _Phrases:
    """A language: phrases of a few tokens, common ones first."""

    def __init__(self, random: np.random.Generator) -> None:
        self._lengths = random.integers(1, LONGEST_PHRASE + 1, PHRASES)
        self._starts = np.cumsum(self._lengths) - self._lengths
        names = random.permutation(VOCABULARY).astype(np.int32)
        self._tokens = names[_zipf(random, VOCABULARY, int(self._lengths.sum()))]

    def text(self, random: np.random.Generator, tokens: int) -> NDArray[np.int32]:
        """int32[tokens]"""
        drawn = _zipf(
            random, PHRASES, tokens
        )  # more phrases than it takes, since each has at least one token
        lengths = self._lengths[drawn]
        drawn = drawn[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
        lengths = self._lengths[drawn]
        before = np.cumsum(lengths) - lengths
        index = np.repeat(self._starts[drawn] - before, lengths) + np.arange(int(lengths.sum()))
        return self._tokens[index[:tokens]]


def _zipf(random: np.random.Generator, ranks: int, count: int) -> NDArray[np.int64]:
    """int64[count]: ranks from 0, with probabilities in proportion to 1 / (rank + 3)."""
    cumulated = np.cumsum(1 / (np.arange(ranks) + 3.0))
    return np.searchsorted(cumulated, random.random(count) * cumulated[-1])
