"""A small language whose entropy is known: what `benchmarks.heads` trains a policy on.

A text is a style, then a mixture of two things:

- letters: three Markov chains in turns. The next letter depends on the one three letters before alone, so a network
  learns it from 64 rows of probabilities, while a history of texts seldom has the same three letters again;
- refrains: a few fixed strings of other tokens, entered at random. Within one nothing is left open.

The style says how often a refrain begins: never ("novel"), now and then ("mixed"), or as soon as the last one ends
("repetitive").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Style = Literal["novel", "mixed", "repetitive"]
STYLES: tuple[Style, ...] = get_args(Style)
REFRAIN_SHARE: dict[Style, float] = {"novel": 0.0, "mixed": 0.04, "repetitive": 1.0}
"""How likely a refrain begins in place of a letter."""

LETTERS = 64
SUCCESSORS = 8
"""Letters that may follow one."""
CHAINS = 3
REFRAINS = 8
REFRAIN_LENGTH = 24
_NOTES = 32  # tokens that refrains are made of, behind their first ones
_FIRST_NOTE = LETTERS
_FIRST_REFRAIN = _FIRST_NOTE + _NOTES
_FIRST_STYLE = _FIRST_REFRAIN + REFRAINS
VOCABULARY_SIZE = _FIRST_STYLE + len(STYLES)


class Language:
    """The probabilities, drawn from `seed`.

    transitions: float64[64, 64], of the letter three later. refrains: int32[8, 24].
    """

    def __init__(self, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.transitions = _transitions(generator)
        self.refrains = _refrains(generator)
        self._ends = [np.cumsum(row).tolist() for row in self.transitions]

    def write(self, style: Style, length: int, generator: np.random.Generator) -> NDArray[np.int32]:
        """A text of `length` tokens, the style's own the first."""
        draws = generator.random((length, 2)).tolist()
        tokens = [_FIRST_STYLE + STYLES.index(style)]
        letters: list[int] = []  # those since the last refrain
        share = REFRAIN_SHARE[style]
        while len(tokens) < length:
            begins, which = draws[len(tokens)]
            if begins < share:
                tokens += self.refrains[int(which * REFRAINS)].tolist()
                letters = []
                continue
            if len(letters) < CHAINS:
                letter = int(which * LETTERS)
            else:
                letter = min(LETTERS - 1, int(np.searchsorted(self._ends[letters[-CHAINS]], which, "right")))
            letters.append(letter)
            tokens.append(letter)
        return np.array(tokens[:length], np.int32)

    def next_probs(self, text: Sequence[int]) -> NDArray[np.float64]:
        """float64[V]: how likely each token comes behind a text that begins with its style."""
        probs = np.zeros(VOCABULARY_SIZE)
        style = STYLES[text[0] - _FIRST_STYLE]
        letters: list[int] = []
        refrain = place = None
        for token in text[1:]:
            if refrain is not None and place is not None and place + 1 < REFRAIN_LENGTH:
                place += 1
            elif token >= _FIRST_REFRAIN:
                refrain, place, letters = token - _FIRST_REFRAIN, 0, []
            elif token < LETTERS:
                refrain = place = None
                letters.append(token)
            else:  # a policy that isn't trained says what the language never does; the chain begins anew
                refrain = place = None
                letters = []
        if refrain is not None and place is not None and place + 1 < REFRAIN_LENGTH:
            probs[self.refrains[refrain, place + 1]] = 1.0
            return probs
        share = REFRAIN_SHARE[style]
        probs[_FIRST_REFRAIN : _FIRST_REFRAIN + REFRAINS] = share / REFRAINS
        letter = (
            self.transitions[letters[-CHAINS]] if len(letters) >= CHAINS else np.full(LETTERS, 1 / LETTERS)
        )
        probs[:LETTERS] = (1 - share) * letter
        return probs

    def entropy(self, texts: Sequence[NDArray[np.int32]], first: int = 1) -> float:
        """Mean entropy in nats of the tokens from `first` on, given those before each."""
        nats = []
        for text in texts:
            for end in range(first, len(text)):
                probs = self.next_probs(text[:end].tolist())
                probs = probs[probs > 0]
                nats.append(-float(probs @ np.log(probs)))
        return math.fsum(nats) / len(nats)

    def nats(self, texts: Sequence[NDArray[np.int32]], first: int = 1) -> float:
        """Mean of -log p of the tokens from `first` on: the least that any policy can reach on average."""
        nats = [
            -math.log(self.next_probs(text[:end].tolist())[text[end]])
            for text in texts
            for end in range(first, len(text))
        ]
        return math.fsum(nats) / len(nats)


def _transitions(generator: np.random.Generator) -> NDArray[np.float64]:
    """A likeliest successor each, all different, and some others; how likely it is differs from letter to letter."""
    favourites = generator.permutation(LETTERS)
    rows = np.zeros((LETTERS, LETTERS))
    for letter, favourite in enumerate(favourites):
        others = generator.choice(np.delete(np.arange(LETTERS), favourite), SUCCESSORS - 1, replace=False)
        sure = generator.uniform(0.6, 0.98)
        rows[letter, favourite] = sure
        rows[letter, others] = (1 - sure) * generator.dirichlet(np.ones(SUCCESSORS - 1))
    return rows


def _refrains(generator: np.random.Generator) -> NDArray[np.int32]:
    """Each begins with a token of its own; no two neighbours behind it stand beside each other anywhere else."""
    used: set[tuple[int, int]] = set()
    refrains = []
    for number in range(REFRAINS):
        tokens = [_FIRST_REFRAIN + number]
        while len(tokens) < REFRAIN_LENGTH:
            last = tokens[-1]
            free = [note for note in range(_FIRST_NOTE, _FIRST_NOTE + _NOTES) if (last, note) not in used]
            tokens.append(int(generator.choice(free)))
            used.add((last, tokens[-1]))
        refrains.append(tokens)
    return np.array(refrains, np.int32)
