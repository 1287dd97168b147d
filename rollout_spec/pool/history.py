"""Which completions the engines tell each other, within a byte budget."""

from __future__ import annotations

from .messages import LearntText


class TextBatch:
    """Completions to share in the next round; those over the budget are left out, the latest ones kept.

    budget_bytes: of one round, at 4 bytes a token.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.left_out_bytes = 0
        self._texts: list[LearntText] = []
        self._first = 0
        self._bytes = 0

    def add(self, text: LearntText) -> None:
        """A completion ended."""
        self._texts.append(text)
        self._bytes += text.size_bytes
        while self._bytes > self.budget_bytes and self._first < len(self._texts):
            dropped = self._texts[self._first].size_bytes
            self._bytes -= dropped
            self.left_out_bytes += dropped
            self._first += 1

    @property
    def size_bytes(self) -> int:
        """Of what the next round will share."""
        return self._bytes

    def take(self) -> list[LearntText]:
        """The round's completions; the next round begins empty."""
        texts = self._texts[self._first :]
        self._texts, self._first, self._bytes = [], 0, 0
        return texts
