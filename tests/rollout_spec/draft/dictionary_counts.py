"""The drafter's counts in plain dictionaries: what the flat tables must agree with."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

from rollout_spec.draft.mixture import LENGTHS, SHAPES, SKIPS

Counts = dict[tuple[Hashable, int, tuple[int, ...]], Counter[int]]


class DictionaryCounts:
    """Counts of each source's followers of each context, kept for ever."""

    def __init__(self) -> None:
        self.counts: Counts = defaultdict(Counter)
        self.text: dict[Hashable, list[int]] = {}
        self.group: dict[Hashable, Hashable] = {}

    def start(self, request: Hashable, prompt: list[int], group: Hashable) -> None:
        self.text[request], self.group[request] = [], group
        for token in prompt:
            self._see(request, token, ("own", request))

    def extend(self, request: Hashable, tokens: list[int]) -> None:
        for token in tokens:
            self._see(request, token, "all", ("group", self.group[request]), ("own", request))

    def finish(self, request: Hashable) -> None:
        del self.text[request], self.group[request]
        for key in [key for key in self.counts if key[0] == ("own", request)]:
            del self.counts[key]

    def followers(self, request: Hashable) -> dict[tuple[int, int], Counter[int]]:
        """(source 0 to 2, shape) -> counts after the request's present context."""
        sources = ("all", ("group", self.group[request]), ("own", request))
        found = {}
        for source, name in enumerate(sources):
            for shape, context in self._contexts(self.text[request]):
                seen = self.counts.get((name, shape, context))
                if seen:
                    found[source, shape] = seen
        return found

    def _see(self, request: Hashable, token: int, *sources: Hashable) -> None:
        for shape, context in self._contexts(self.text[request]):
            for source in sources:
                self.counts[source, shape, context][token] += 1
        self.text[request].append(token)

    @staticmethod
    def _contexts(text: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        found = []
        for shape in range(SHAPES):
            end = len(text) - int(SKIPS[shape])
            if end >= LENGTHS[shape]:
                found.append((shape, tuple(text[end - int(LENGTHS[shape]) : end])))
        return found
