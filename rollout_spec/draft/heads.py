"""Drafts of the policy's own multi-token-prediction heads.

The heads run on the device, in the engine's step; this is the host's part. It keeps what they named behind the last
token of each request, turns it into a tree, and learns how often such tokens are accepted.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import HistoryError
from ..tree import ROOT, DraftTree
from .config import DraftConfig
from .drafter import TokenSequence
from .history_file import read_file, write_file

_GRID = 12
_PRIOR = 4.0  # sightings that the head's own probability counts as
_KEPT = 0.999  # of what was seen, from a sighting to the next
_KEPT_BY_UPDATE = 0.5


class HeadCalibration:
    """From a head's probability of a token to how often such a token was accepted once its parent was.

    A table for each depth and rank, over a grid of the square root of the probability.
    """

    def __init__(self, depth: int, choices: int) -> None:
        self.seen = np.zeros((depth, choices, _GRID))
        self.hits = np.zeros((depth, choices, _GRID))
        self._middle = np.square((np.arange(_GRID) + 0.5) / _GRID)

    def shares(self, probs: NDArray[np.float32]) -> NDArray[np.float64]:
        """float64[depth, choices] for probabilities of that shape: the expected share accepted."""
        cells = self._cells(probs)
        hits = np.take_along_axis(self.hits, cells[..., None], axis=2)[..., 0]
        seen = np.take_along_axis(self.seen, cells[..., None], axis=2)[..., 0]
        return (hits + _PRIOR * probs) / (seen + _PRIOR)

    def settle(self, depth: int, probs: NDArray[np.float32], hit: int | None) -> None:
        """Of the tokens named at `depth`, with probabilities float32[choices], number `hit` came, or none."""
        cells = np.minimum((np.sqrt(probs) * _GRID).astype(np.int64), _GRID - 1)
        for rank, cell in enumerate(cells.tolist()):
            self.seen[depth, rank, cell] = self.seen[depth, rank, cell] * _KEPT + 1.0
            self.hits[depth, rank, cell] = self.hits[depth, rank, cell] * _KEPT + (rank == hit)

    def fade(self) -> None:
        """The heads changed: what was seen of them counts less."""
        self.seen *= _KEPT_BY_UPDATE
        self.hits *= _KEPT_BY_UPDATE

    @staticmethod
    def _cells(probs: NDArray[np.float32]) -> NDArray[np.int64]:
        return np.minimum((np.sqrt(probs) * _GRID).astype(np.int64), _GRID - 1)


class HeadDrafter:
    """A `Drafter` of what the heads named; `offer` hands it over after each step."""

    def __init__(self, config: DraftConfig | None = None) -> None:
        self.config = config or DraftConfig(kind="mtp")
        self.calibration = HeadCalibration(self.config.look_ahead, self.config.choices)
        self._offers: dict[Hashable, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}

    def start(self, request_id: Hashable, prompt: TokenSequence, group_id: Hashable = None) -> None:
        self._offers.pop(request_id, None)

    def offer(self, request_id: Hashable, tokens: NDArray[np.int32], probs: NDArray[np.float32]) -> None:
        """What the heads name behind the request's last token, [depth, choices]; depths may be fewer than usual."""
        if len(tokens):
            self._offers[request_id] = (tokens, probs)
        else:
            self._offers.pop(request_id, None)

    def has_offer(self, request_id: Hashable) -> bool:
        return request_id in self._offers

    def extend(self, request_id: Hashable, tokens: TokenSequence) -> None:
        """The request's next tokens are known: the calibration learns, and the offer is spent."""
        offered = self._offers.pop(request_id, None)
        if offered is None:
            return
        names, probs = offered
        for depth, token in enumerate(np.asarray(tokens)[: len(names)].tolist()):
            row = names[depth].tolist()
            self.calibration.settle(depth, probs[depth], row.index(token) if token in row else None)
            if row[0] != token:
                return

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]:
        return [self._tree(name, budget) for name, budget in zip(request_ids, budgets, strict=True)]

    def _tree(self, request_id: Hashable, budget: int) -> DraftTree:
        offered = self._offers.get(request_id)
        if offered is None or budget < 1:
            return DraftTree()
        names, probs = offered
        full = np.zeros((self.config.look_ahead, self.config.choices), np.float32)
        full[: len(probs)] = probs
        shares = self.calibration.shares(full).tolist()
        tokens: list[int] = []
        parents: list[int] = []
        reached: list[float] = []
        parent, chain = ROOT, 1.0
        for depth, row in enumerate(names.tolist()):
            first = len(tokens)
            left = 1.0  # siblings exclude each other
            for token, share in zip(row, shares[depth], strict=True):
                share = min(share, left)
                left -= share
                if chain * share < self.config.min_prob:
                    break
                tokens.append(token)
                parents.append(parent)
                reached.append(chain * share)
            if len(tokens) == first:
                break
            parent, chain = first, reached[first]
        tree = DraftTree(
            np.array(tokens, np.int32), np.array(parents, np.int32), np.array(reached, np.float32)
        )
        return tree if len(tree) <= budget else tree.likeliest(budget)

    def finish(self, request_id: Hashable) -> None:
        self._offers.pop(request_id, None)

    def new_version(self, version: int) -> None:
        self.calibration.fade()

    @property
    def memory_bytes(self) -> int:
        offers = sum(tokens.nbytes + probs.nbytes for tokens, probs in self._offers.values())
        return offers + self.calibration.seen.nbytes + self.calibration.hits.nbytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibration, which is all that is learnt here."""
        write_file(path, self._facts(), {"seen": self.calibration.seen, "hits": self.calibration.hits})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces the calibration by what `save` wrote; raises HistoryError on any other file."""
        with open(path, "rb") as file:
            found = read_file(file)
        if found.facts != self._facts():
            raise HistoryError(
                f"{os.fspath(path)} holds {found.facts}, and this drafter is of {self._facts()}; "
                "load the file of a drafter with the same kind, head_depth and head_choices"
            )
        self.calibration.seen[:] = found.arrays["seen"]
        self.calibration.hits[:] = found.arrays["hits"]

    def _facts(self) -> dict[str, Any]:
        return {"kind": "heads", "depth": self.config.look_ahead, "choices": self.config.choices}
