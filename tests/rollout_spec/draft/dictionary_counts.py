"""The drafter's counts in plain dictionaries: what the flat tables must agree with."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

from rollout_spec.draft.counts import ONE
from rollout_spec.draft.evidence import DECISIVE, DECISIVE_SHAPE, LENGTHS, PLAIN_SHAPES, SHAPES
from rollout_spec.draft.kernels import DEEPEN

Counts = dict[tuple[Hashable, int, tuple[int, ...]], Counter[int]]
Evidence = dict[tuple[str, int], Counter[int]]


class DictionaryCounts:
    """Counts of each source's followers of each context, kept for ever."""

    def __init__(self) -> None:
        self.counts: Counts = defaultdict(Counter)
        self.text: dict[Hashable, list[int]] = {}
        self.group: dict[Hashable, Hashable] = {}

    def start(self, request: Hashable, prompt: list[int], group: Hashable) -> None:
        self.text[request], self.group[request] = list(prompt), group

    def extend(self, request: Hashable, tokens: list[int]) -> None:
        for token in tokens:
            self._see(request, token)
            self.text[request].append(token)

    def finish(self, request: Hashable) -> None:
        del self.text[request], self.group[request]

    def evidence(self, request: Hashable) -> Evidence:
        """(source, shape) -> counts after the request's present context, as far as the drafter looks."""
        text, found = self.text[request], {}
        contexts = dict(self._contexts(text))
        decided = False
        for shape in sorted(contexts, key=lambda shape: (shape >= PLAIN_SHAPES, -shape)):
            if decided:
                break
            for source in ("everything", ("group", self.group[request])):
                seen = self.counts.get((source, shape, contexts[shape]))
                if seen:
                    found["everything" if source == "everything" else "group", shape] = Counter(seen)
            seen = found.get(("everything", shape))
            often = seen is not None and seen.total() >= DECISIVE / ONE and len(seen) == 1
            decided = often and DECISIVE_SHAPE <= shape < PLAIN_SHAPES
        return found if decided else {**found, **self._own(text)}

    def _see(self, request: Hashable, token: int) -> None:
        """A longer context is counted only once a shorter one was known."""
        longest = DEEPEN - 1
        for shape, context in self._contexts(self.text[request]):
            if LENGTHS[shape] > LENGTHS[min(longest, PLAIN_SHAPES - 1)]:
                continue
            known = bool(self.counts.get(("everything", shape, context)))
            self.counts["everything", shape, context][token] += 1
            if shape < PLAIN_SHAPES:
                self.counts[("group", self.group[request]), shape, context][token] += 1
                longest = shape + DEEPEN if known else longest

    @staticmethod
    def _own(text: list[int]) -> Evidence:
        """Counts of all places of the text, by how much of the context stands before them."""
        found: Evidence = defaultdict(Counter)
        for place in range(1, len(text)):
            for shape in range(PLAIN_SHAPES):
                length = int(LENGTHS[shape])
                if place >= length and text[place - length : place] == text[len(text) - length :]:
                    found["own", shape][text[place]] += 1
        return found

    @staticmethod
    def _contexts(text: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        found = []
        for shape in range(SHAPES):
            end = len(text) - (1 if shape >= PLAIN_SHAPES else 0)
            if end >= LENGTHS[shape]:
                found.append((shape, tuple(text[end - int(LENGTHS[shape]) : end])))
        return found
