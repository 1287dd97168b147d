"""The draft tree: what a drafter proposes and one forward pass verifies.

A tree of N nodes hangs below a root that is not one of them: the last token of the request, whose key and
value are not cached yet. In a step the root is token 0 of its sequence and node i is token i + 1, which is
the numbering of the ancestor words. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import DraftError

MAX_NODES = 63
"""Most nodes beside the root, so that the ancestors of a token fit two 32-bit words."""

ROOT = -1
"""The parent of a child of the root."""

_SLACK = 1e-5  # float32 products may round a child above its parent


def _empty(dtype: type) -> NDArray:
    return np.empty(0, dtype)


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Draft tokens below the root.

    tokens: int32[N], token ids. parents: int32[N], the parent's index, below the node's own, -1 for a child
    of the root. probs: float32[N], the drafter's estimate that the node is reached and accepted, so at most
    its parent's. Siblings hold different tokens; N is at most `MAX_NODES`.

    The constructor only converts to these dtypes; `validate` checks the rest.
    """

    tokens: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    parents: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    probs: NDArray[np.float32] = field(default_factory=lambda: _empty(np.float32))

    def __post_init__(self) -> None:
        for name, dtype in (("tokens", np.int32), ("parents", np.int32), ("probs", np.float32)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def path(cls, tokens: ArrayLike, probs: ArrayLike | None = None) -> DraftTree:
        """One chain of tokens [N]; probs [N] default to 1."""
        chain = np.asarray(tokens, np.int32)
        return cls(
            chain,
            np.arange(-1, len(chain) - 1, dtype=np.int32),
            np.ones(len(chain), np.float32) if probs is None else np.asarray(probs, np.float32),
        )

    def validate(self, *, max_nodes: int = MAX_NODES, vocab_size: int | None = None) -> DraftTree:
        """Returns self, or raises DraftError listing everything that is wrong with the tree."""
        faults = self._faults(max_nodes, vocab_size)
        if faults:
            raise DraftError("a malformed draft tree: " + "; ".join(faults))
        return self

    def _faults(self, max_nodes: int, vocab_size: int | None) -> list[str]:
        shapes = [array.shape for array in (self.tokens, self.parents, self.probs)]
        if any(len(shape) != 1 for shape in shapes) or len(set(shapes)) != 1:
            return [f"tokens, parents and probs must be vectors of one length, their shapes are {shapes}"]
        faults = []
        tokens, parents, probs = self.tokens, self.parents, self.probs
        if len(tokens) > max_nodes:
            faults.append(f"at most {max_nodes} nodes are allowed, there are {len(tokens)}")
        index = np.arange(len(parents))
        unordered = (parents < ROOT) | (parents >= index)
        if unordered.any():
            faults.append(
                f"parents[i] must lie in [-1, i), it does not at {np.flatnonzero(unordered).tolist()}"
            )
        if (tokens < 0).any() or (vocab_size is not None and (tokens >= vocab_size).any()):
            bound = "2**31" if vocab_size is None else str(vocab_size)
            faults.append(
                f"tokens must lie in [0, {bound}), they range over {tokens.min()} to {tokens.max()}"
            )
        if len({(p, t) for p, t in zip(parents.tolist(), tokens.tolist(), strict=True)}) < len(tokens):
            faults.append("siblings must hold different tokens")
        if not ((probs >= 0) & (probs <= 1 + _SLACK)).all():  # also catches nan
            faults.append("probs must lie in [0, 1]")
        elif not unordered.any():
            below = np.where(parents == ROOT, np.float32(1), probs[parents] if len(probs) else np.float32(1))
            if (probs > below + _SLACK).any():
                faults.append("a node's prob must not exceed its parent's")
        return faults

    def depths(self) -> NDArray[np.int32]:
        """int32[N]: tokens between the root and the node, 1 for a child of the root."""
        depths = np.empty(len(self), np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            depths[node] = 1 if parent == ROOT else depths[parent] + 1
        return depths

    def ancestors(self) -> NDArray[np.uint32]:
        """uint32[N + 1, 2]: the mask of each token of the step, see `ancestor_words`."""
        return ancestor_words(self.parents)

    def depth_first(self) -> DraftTree:
        """The same tree numbered depth first, the likelier child first.

        The likeliest path then lies in consecutive tokens of the step, so keys and values that
        are accepted seldom have to move.
        """
        order = depth_first_order(self.parents, self.probs)
        number = np.empty(len(order) + 1, np.int32)
        number[order] = np.arange(len(order), dtype=np.int32)
        number[ROOT] = ROOT  # the last entry, which a parent of -1 indexes
        return DraftTree(self.tokens[order], number[self.parents[order]], self.probs[order])

    def likeliest(self, count: int) -> DraftTree:
        """The `count` likeliest nodes, in the order they have here. Parents of kept nodes are kept."""
        if count >= len(self):
            return self
        # A child is never likelier than its parent and comes after it, so a stable sort keeps parents first.
        keep = np.sort(np.argsort(-self.probs, kind="stable")[: max(count, 0)])
        number = np.full(len(self) + 1, ROOT, np.int32)
        number[keep] = np.arange(len(keep), dtype=np.int32)
        return DraftTree(self.tokens[keep], number[self.parents[keep]], self.probs[keep])

    def accepted(self, text: Sequence[int]) -> list[int]:
        """The nodes that `text` follows from the root, in order."""
        children = {
            (p, t): node
            for node, (p, t) in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))
        }
        node, followed = ROOT, []
        for token in text:
            if (node, int(token)) not in children:
                break
            node = children[node, int(token)]
            followed.append(node)
        return followed


def ancestor_words(parents: ArrayLike) -> NDArray[np.uint32]:
    """uint32[N + 1, 2]: which tokens of its own step each token of the step sees, for parents int[N].

    Row 0 is the root and row i + 1 node i. Bit j of word w is set when the token is, or descends from, token
    32 w + j of the step; the root's bit is set in every row.
    """
    masks = [1]
    for node, parent in enumerate(np.asarray(parents).tolist()):
        masks.append(masks[parent + 1] | 1 << (node + 1))
    return np.array([(mask & 0xFFFFFFFF, mask >> 32) for mask in masks], np.uint32)


def depth_first_order(parents: ArrayLike, probs: ArrayLike) -> NDArray[np.int32]:
    """int32[N]: the nodes depth first, among siblings the likelier first."""
    parent_list, prob_list = np.asarray(parents).tolist(), np.asarray(probs).tolist()
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parent_list):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    stack = [ROOT]
    while stack:
        node = stack.pop()
        if node != ROOT:
            order.append(node)
        # Pushed least likely first, and of equals the later one, so that the likeliest and first is next.
        stack.extend(sorted(reversed(children.get(node, [])), key=lambda child: prob_list[child]))
    return np.array(order, np.int32)
