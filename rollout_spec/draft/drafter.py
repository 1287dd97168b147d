"""What the engine asks of a drafter, and the making of the one a config names."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..tree import DraftTree
from .config import DraftConfig

TokenSequence = Sequence[int] | NDArray[np.integer]


@runtime_checkable
class Drafter(Protocol):
    """Proposes continuations of running requests. What it proposes never changes a token, only the speed."""

    def start(self, request_id: Hashable, prompt: TokenSequence, group_id: Hashable = None) -> None:
        """A request begins (or begins anew, after preemption). Requests of equal group_id share history."""

    def extend(self, request_id: Hashable, tokens: TokenSequence) -> None:
        """The request's next tokens are known."""

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]:
        """A tree of at most budgets[i] nodes below the last token of request_ids[i], for each i."""

    def finish(self, request_id: Hashable) -> None:
        """The request ended or was aborted; its private context is dropped."""

    def new_version(self, version: int) -> None:
        """The policy's weights were replaced."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the history to one file."""

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces the history by what `save` wrote; raises HistoryError on any other file."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held."""


def make_drafter(config: DraftConfig) -> Drafter | None:
    """The drafter that `config` names; None for kind "none"."""
    if config.kind == "none":
        return None
    if config.kind == "mtp":
        from .heads import HeadDrafter

        return HeadDrafter(config)
    if config.kind == "hybrid":
        from .hybrid import HybridDrafter

        return HybridDrafter(config)
    from .trie import TrieDrafter

    return TrieDrafter(config)
