"""Drafters that no one would use: they draft nonsense, or the truth, or the truth hidden in nonsense.

They also watch the engine: any call that breaks the Drafter contract fails the test that made it.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollout_spec.tree import MAX_NODES, ROOT, DraftTree

TokenSequence = Sequence[int] | NDArray[np.integer]
Shape = Literal["empty", "chain", "star", "mixed"]
SHAPES: tuple[Shape, ...] = ("empty", "chain", "star", "mixed")


def random_tree(
    rng: np.random.Generator, size: int, vocab_size: int, guesses: Iterable[Sequence[int]], shape: Shape
) -> DraftTree:
    """A valid tree of at most `size` nodes: guesses (paths from the root) among random nodes, shuffled."""
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}

    def insert(parent: int, token: int) -> int:
        """The node's index; ROOT if there is no room for it."""
        if (parent, token) not in children:
            if len(tokens) >= size:
                return ROOT
            children[parent, token] = len(tokens)
            tokens.append(token)
            parents.append(parent)
        return children[parent, token]

    paths = [(ROOT, list(guess)) for guess in guesses if len(guess)]
    attempts = 3 * size  # a random node may hit one that is there already
    while len(tokens) < size and (paths or attempts > 0):
        if paths and rng.random() < 0.8:
            choice = int(rng.integers(len(paths)))
            node, rest = paths[choice]
            paths[choice] = (insert(node, rest[0]), rest[1:])
            if len(rest) == 1:
                del paths[choice]
        elif shape == "empty":
            attempts = 0
        else:
            attempts -= 1
            newest = len(tokens) - 1
            parent = {"chain": newest, "star": ROOT, "mixed": int(rng.integers(-1, newest + 1))}[shape]
            insert(parent, int(rng.integers(vocab_size)))

    probs = np.ones(len(tokens), np.float32)
    for node, parent in enumerate(parents):
        probs[node] = np.float32(rng.uniform(0.05, 1.0)) * (1 if parent == ROOT else probs[parent])
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), probs)


class WatchingDrafter:
    """Follows every request's context and checks the engine's side of the contract. Drafts nothing."""

    def __init__(self) -> None:
        self.contexts: dict[Hashable, list[int]] = {}
        self.ended: list[list[int]] = []  # the contexts of finished requests, in the order they ended
        self.versions: list[int] = []

    def start(self, request_id: Hashable, prompt: TokenSequence, group_id: Hashable = None) -> None:
        self.contexts[request_id] = [int(token) for token in prompt]

    def extend(self, request_id: Hashable, tokens: TokenSequence) -> None:
        assert request_id in self.contexts, f"extend of {request_id!r}, which never started or has finished"
        self.contexts[request_id] += [int(token) for token in tokens]

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]:
        assert len(request_ids) == len(budgets) == len(set(request_ids))
        trees = []
        for request_id, budget in zip(request_ids, budgets, strict=True):
            assert request_id in self.contexts, (
                f"propose for {request_id!r}, which never started or has finished"
            )
            assert 0 <= budget <= MAX_NODES
            trees.append(self.tree(self.contexts[request_id], int(budget)))
        return trees

    def finish(self, request_id: Hashable) -> None:
        assert request_id in self.contexts, f"finish of {request_id!r}, which never started or has finished"
        self.ended.append(self.contexts.pop(request_id))

    def new_version(self, version: int) -> None:
        self.versions.append(version)

    def save(self, path: str | os.PathLike[str]) -> None:
        raise AssertionError("no test saves the history of this drafter")

    def load(self, path: str | os.PathLike[str]) -> None:
        raise AssertionError("no test loads a history into this drafter")

    @property
    def memory_bytes(self) -> int:
        return 0

    def tree(self, context: Sequence[int], budget: int) -> DraftTree:
        return DraftTree()


class AdversarialDrafter(WatchingDrafter):
    """Random valid trees of every shape and size, the fullest included."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng(seed)

    def tree(self, context: Sequence[int], budget: int) -> DraftTree:
        size = budget if self.rng.random() < 0.5 else int(self.rng.integers(budget + 1))
        return random_tree(self.rng, size, self.vocab_size, [], SHAPES[int(self.rng.integers(len(SHAPES)))])


class OracleDrafter(WatchingDrafter):
    """Drafts what will come, from whole sequences (prompt and completion) known beforehand.

    Every sequence that begins with the context so far is a path of the tree; `mixed` hides them among random
    nodes. A sequence may go on where a completion will end: what lies beyond the end must not be returned.
    """

    def __init__(
        self,
        sequences: Iterable[Sequence[int]],
        vocab_size: int,
        seed: int = 0,
        *,
        mixed: bool = False,
        deepest: int = MAX_NODES,
    ) -> None:
        super().__init__()
        self.deepest = deepest
        self.vocab_size = vocab_size
        self.mixed = mixed
        self.rng = np.random.default_rng(seed)
        self._continuations: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for sequence in sequences:
            self.know(sequence)

    def know(self, sequence: Sequence[int]) -> None:
        whole = tuple(int(token) for token in sequence)
        for length in range(1, len(whole)):
            coming = whole[length : length + self.deepest]
            self._continuations.setdefault(whole[:length], set()).add(coming)

    def tree(self, context: Sequence[int], budget: int) -> DraftTree:
        truths = sorted(self._continuations.get(tuple(context), ()))
        if not self.mixed:
            return random_tree(self.rng, budget, self.vocab_size, truths, "empty")
        kept = [truth[: int(self.rng.integers(1, len(truth) + 1))] for truth in truths]
        return random_tree(self.rng, budget, self.vocab_size, kept, "mixed")
