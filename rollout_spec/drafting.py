"""Where the engine meets the drafter: proposals for the sequences that decode, within the step's budget."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from .batch import StepEntry
from .draft.budget import StepOption, StepTimes, share_nodes
from .draft.config import DraftConfig
from .draft.drafter import Drafter
from .draft.trie import TrieDrafter
from .errors import DraftError
from .scheduler import Scheduler
from .shapes import smallest_fitting
from .step import StepShape
from .tree import DraftTree


class DraftPlanner:
    """Adds draft trees to a step and chooses the step's shape."""

    def __init__(
        self,
        config: DraftConfig,
        drafter: Drafter | None,
        shapes: Sequence[StepShape],
        vocab_size: int,
    ) -> None:
        self.config = config
        self.drafter = drafter
        self.shapes = shapes
        self.vocab_size = vocab_size
        self.times = StepTimes()

    def plan(self, entries: Sequence[StepEntry], scheduler: Scheduler) -> StepShape:
        """Sets the entries' trees; returns the shape that takes them all."""
        tokens = sum(entry.num_tokens for entry in entries)
        rows = sum(entry.num_rows for entry in entries)
        decoding = [e for e in entries if e.samples and e.count == 1 and e.sequence.room > 1]
        options: list[StepOption] = []
        for shape in self.shapes:
            capacity = min(shape.tokens - tokens, shape.rows - rows)
            fits = shape.tokens >= tokens and shape.rows >= rows and shape.sequences >= len(entries)
            if fits and (not options or capacity > options[-1].capacity):
                options.append(StepOption(shape, capacity))
        if self.drafter is None or not decoding or self.config.max_nodes == 0:
            return self._fitting(entries)
        capacity = options[-1].capacity
        most = self.config.max_nodes
        if not self.config.gate:
            most = min(most, capacity // len(decoding))
        trees = self._propose(decoding, [min(most, capacity)] * len(decoding))
        if self.config.gate:
            budget = share_nodes([tree.probs for tree in trees], options, self.times)
            trees = [tree.likeliest(count) for tree, count in zip(trees, budget.nodes, strict=True)]
        for entry, tree in zip(decoding, trees, strict=True):
            fitting = scheduler.pages_for_draft(entry.sequence, len(tree))
            if len(tree):
                entry.tree = first_nodes(tree, fitting) if fitting < len(tree) else tree
        return self._fitting(entries)

    def _fitting(self, entries: Sequence[StepEntry]) -> StepShape:
        tokens = sum(entry.num_tokens for entry in entries)
        rows = sum(entry.num_rows for entry in entries)
        shape = smallest_fitting(self.shapes, tokens, len(entries), rows)
        assert shape is not None, (tokens, rows, len(entries))
        return shape

    def _propose(self, decoding: Sequence[StepEntry], budgets: list[int]) -> list[DraftTree]:
        assert self.drafter is not None
        keys: list[Hashable] = [entry.sequence.key for entry in decoding]
        trees = self.drafter.propose(keys, budgets)
        if len(trees) != len(keys):
            raise DraftError(f"the drafter was asked for {len(keys)} trees and returned {len(trees)}")
        for tree, budget in zip(trees, budgets, strict=True):
            if not isinstance(self.drafter, TrieDrafter):
                tree.validate(max_nodes=budget, vocab_size=self.vocab_size)
            elif len(tree) and int(tree.tokens.max()) >= self.vocab_size:
                raise DraftError(
                    f"the drafter's history has token {int(tree.tokens.max())}, outside this model's vocabulary of "
                    f"{self.vocab_size}; it comes from another model"
                )
        return [
            within_depth(tree, entry.sequence.room - 1) for tree, entry in zip(trees, decoding, strict=True)
        ]


def first_nodes(tree: DraftTree, count: int) -> DraftTree:
    """The first `count` nodes; a parent comes before its children, so they are a tree."""
    return DraftTree(tree.tokens[:count], tree.parents[:count], tree.probs[:count])


def within_depth(tree: DraftTree, depth: int) -> DraftTree:
    """Without the nodes more than `depth` tokens below the root, which the length limit would cut."""
    if len(tree) <= depth:  # no path can be longer than all nodes
        return tree
    keep = np.flatnonzero(tree.depths() <= depth)
    if len(keep) == len(tree):
        return tree
    number = np.full(len(tree) + 1, -1, np.int32)
    number[keep] = np.arange(len(keep), dtype=np.int32)
    return DraftTree(tree.tokens[keep], number[tree.parents[keep]], tree.probs[keep])
