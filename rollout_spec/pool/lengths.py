"""How long completions are expected to become, from those seen before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

_MOST_PROMPTS = 200_000
_WEIGHT_OF_NEWS = 0.3


class LengthHistory:
    """Mean completion length, of a prompt where it was seen before and else of all prompts. In tokens."""

    def __init__(self) -> None:
        self._by_prompt: OrderedDict[Hashable, float] = OrderedDict()
        self._total = 0.0
        self._count = 0

    def record(self, prompt: Hashable, tokens: int) -> None:
        """A completion of `prompt` ended with so many tokens."""
        self._total += tokens
        self._count += 1
        known = self._by_prompt.get(prompt)
        mean = float(tokens) if known is None else known + _WEIGHT_OF_NEWS * (tokens - known)
        self._by_prompt[prompt] = mean
        self._by_prompt.move_to_end(prompt)
        if len(self._by_prompt) > _MOST_PROMPTS:
            self._by_prompt.popitem(last=False)

    def knows(self, prompt: Hashable) -> bool:
        """Whether a completion of `prompt` was seen."""
        return prompt in self._by_prompt

    def expected(self, prompt: Hashable, max_tokens: int) -> float:
        """Tokens of the next completion of `prompt`, at most max_tokens; that many before any was seen."""
        if self._count == 0:
            return float(max_tokens)
        return min(float(max_tokens), max(1.0, self._by_prompt.get(prompt, self._total / self._count)))
