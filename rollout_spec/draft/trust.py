"""What a request's drafts have been worth lately, so that one whose drafts fail stops paying for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_KEPT = 0.9  # of the evidence, from a step with drafts to the next
_KEPT_IDLE = 0.97  # from a step without: doubts fade, and drafts are tried again
_NEWLY_FAMILIAR = 4  # tokens


@dataclass
class Patience:
    """When to ask again what lately answered that drafting doesn't pay."""

    wait: int = 0
    """Steps until it is asked again."""
    fruitless: int = 0
    """Times in a row that it was asked in vain."""

    def is_over(self) -> bool:
        """Whether to ask in this step; counts the steps."""
        if self.wait == 0:
            return True
        self.wait -= 1
        return False

    def rewarded(self) -> None:
        """Something drafted was worth verifying."""
        self.wait = self.fruitless = 0

    def tried(self, longest_wait: int) -> None:
        """Nothing was: it is asked half as often as before, but not more seldom than given."""
        self.fruitless = min(self.fruitless + 1, 16)
        self.wait = min((1 << self.fruitless) - 1, longest_wait)


@dataclass
class Trust:
    """One request's record. Probabilities are calibrated over all requests; this one may be unlike the others."""

    expected: float = 0.0
    accepted: float = 0.0
    """Draft tokens that were expected to be accepted, and that were; older ones count less."""
    patience: Patience = field(default_factory=Patience)
    familiar: int = 0
    """The request's familiar tokens when it was asked last, see `TrieDrafter.familiar_tokens`."""

    @property
    def factor(self) -> float:
        """What to multiply this request's probabilities with: 1 unless clearly less was accepted than expected."""
        likely = self.accepted + math.sqrt(self.expected) + 1.0
        return min(1.0, likely / (self.expected + 1.0))

    def newly_familiar(self, familiar: int) -> bool:
        """Whether the text has begun to repeat since the request was asked last."""
        return familiar >= 2 * self.familiar + _NEWLY_FAMILIAR

    def idle(self, steps: int = 1) -> None:
        """Steps in which nothing of this request was drafted."""
        self.expected *= _KEPT_IDLE**steps
        self.accepted *= _KEPT_IDLE**steps

    def verified(self, expected: float, accepted: int) -> None:
        """So many draft tokens were expected to be accepted, and so many were."""
        self.expected = _KEPT * self.expected + expected
        self.accepted = _KEPT * self.accepted + accepted
