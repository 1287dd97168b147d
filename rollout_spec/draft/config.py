"""What the drafter is and how much it may spend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from ..tree import MAX_NODES

DraftKind = Literal["trie", "mtp", "hybrid", "none"]
_KINDS = ("trie", "mtp", "hybrid", "none")
LONGEST_MATCH = 16
"""Tokens of context that the drafter keeps, so the most that max_match can be."""


@dataclass(frozen=True)
class DraftConfig:
    """Drafting options. Raises ConfigError at once, listing every value out of range.

    kind: "trie" drafts from history, "mtp" from the policy's own multi-token-prediction heads, "hybrid" from both;
        "none" switches drafting off.
    max_nodes: most draft tokens a request gets in a step, at most 63.
    branching: draft a tree; False drafts a single path.
    gate: let the engine draft fewer nodes, or none, where verifying them would cost more than it saves.
    capacity_tokens: how many learnt tokens the history is sized for; beyond them the oldest and least used
        are forgotten, a few at a time.
    max_match: longest context, in tokens, whose continuations are counted; at most 16.
    min_prob: nodes less likely than this are not proposed.
    version_decay: what is left of a count after each weight update, in (0, 1]; 1 never ages.
    head_depth: tokens that heads draft ahead, one behind the other; at most 16, and no more than max_nodes.
    head_choices: tokens that heads propose at each of these places, the others as leaves beside the likeliest; at most
        8. Without branching it is one.
    """

    kind: DraftKind = "trie"
    max_nodes: int = 16
    branching: bool = True
    gate: bool = True
    capacity_tokens: int = 4_000_000
    max_match: int = LONGEST_MATCH
    min_prob: float = 0.001
    version_decay: float = 0.85
    head_depth: int = 3
    head_choices: int = 2

    def __post_init__(self) -> None:
        faults = []
        if self.kind not in _KINDS:
            faults.append(f"kind must be one of {', '.join(_KINDS)}, got {self.kind!r}")
        for name, least, most in (
            ("max_nodes", 0, MAX_NODES),
            ("capacity_tokens", 1, None),
            ("max_match", 1, LONGEST_MATCH),
            ("head_depth", 1, 16),
            ("head_choices", 1, 8),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                faults.append(f"{name} must be an int, got {value!r}")
            elif value < least or (most is not None and value > most):
                bound = f"at least {least}" + ("" if most is None else f" and at most {most}")
                faults.append(f"{name} must be {bound}, got {value}")
        for name in ("branching", "gate"):
            if not isinstance(getattr(self, name), bool):
                faults.append(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not _is_number(self.min_prob) or not 0 < self.min_prob < 1:
            faults.append(f"min_prob must lie between 0 and 1, got {self.min_prob!r}")
        if not _is_number(self.version_decay) or not 0 < self.version_decay <= 1:
            faults.append(f"version_decay must be above 0 and at most 1, got {self.version_decay!r}")
        if faults:
            raise ConfigError("DraftConfig: " + "; ".join(faults))

    @property
    def look_ahead(self) -> int:
        """Tokens that heads draft ahead."""
        return min(self.head_depth, max(1, self.max_nodes))

    @property
    def choices(self) -> int:
        """Tokens that heads propose at each place."""
        return self.head_choices if self.branching else 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
