"""Drafts of the trie and of the policy's heads, in one tree."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence

import numpy as np

from ..tree import ROOT, DraftTree
from .config import DraftConfig
from .drafter import TokenSequence
from .heads import HeadDrafter
from .trie import TrieDrafter


class HybridDrafter:
    """A `Drafter` that proposes what either would, the likeliest first; both estimates are calibrated.

    What is saved and loaded is the trie's history.
    """

    def __init__(self, config: DraftConfig | None = None) -> None:
        self.config = config or DraftConfig(kind="hybrid")
        self.trie = TrieDrafter(self.config)
        self.heads = HeadDrafter(self.config)
        self.gained = 0.0
        """Accepted tokens that the heads' nodes are expected to add to the trees proposed last."""

    def start(self, request_id: Hashable, prompt: TokenSequence, group_id: Hashable = None) -> None:
        self.trie.start(request_id, prompt, group_id=group_id)
        self.heads.start(request_id, prompt)

    def extend(self, request_id: Hashable, tokens: TokenSequence) -> None:
        self.heads.extend(request_id, tokens)
        self.trie.extend(request_id, tokens)

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]:
        own = self.trie.propose(request_ids, budgets)
        added = self.heads.propose(request_ids, budgets)
        trees = []
        self.gained = 0.0
        for one, other, budget in zip(own, added, budgets, strict=True):
            tree = merged(one, other).likeliest(budget)
            self.gained += float(tree.probs.sum() - one.probs.sum())
            trees.append(tree)
        return trees

    def finish(self, request_id: Hashable) -> None:
        self.heads.finish(request_id)
        self.trie.finish(request_id)

    def new_version(self, version: int) -> None:
        self.heads.new_version(version)
        self.trie.new_version(version)

    @property
    def memory_bytes(self) -> int:
        return self.trie.memory_bytes + self.heads.memory_bytes

    def save(self, path: str | os.PathLike[str]) -> None:
        self.trie.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        self.trie.load(path)


def merged(one: DraftTree, other: DraftTree) -> DraftTree:
    """All nodes of both; one that both have counts once, with the larger of its two probabilities."""
    if not len(other):
        return one
    if not len(one):
        return other
    tokens, parents, probs = one.tokens.tolist(), one.parents.tolist(), one.probs.tolist()
    found = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    number = {ROOT: ROOT}
    for node, (token, parent, prob) in enumerate(
        zip(other.tokens.tolist(), other.parents.tolist(), other.probs.tolist(), strict=True)
    ):
        place = (number[parent], token)
        if place in found:
            number[node] = found[place]
            probs[found[place]] = max(probs[found[place]], prob)
        else:
            number[node] = found[place] = len(tokens)
            tokens.append(token)
            parents.append(place[0])
            probs.append(prob)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probs, np.float32))
