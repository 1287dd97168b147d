"""The suffix tree that vLLM drafts with, from the PyPI package arctic-inference, behind the calls of our drafter.

It is not needed to measure our own drafter. Its build asks for torch, though the suffix tree itself needs none, so it
gets an environment of its own:

    scripts/make_venv.sh .venv-rival dev -- torch==2.13.0 ninja cmake nanobind==2.9.2 grpcio-tools protobuf
    PATH=$PWD/.venv-rival/bin:$PATH pip install --no-build-isolation --no-deps arctic-inference==0.3.0
    .venv-rival/bin/python -m benchmarks.drafter --rival
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_spec.tree import DraftTree

PACKAGE = "arctic-inference"
_MODULE = "arctic_inference.suffix_decoding"


@dataclass(frozen=True)
class SuffixTreeSettings:
    """Arguments of arctic-inference's cache and its `speculate`.

    max_tree_depth: tokens of a match and its continuation together. max_spec_factor, max_spec_offset: a draft has at
    most factor * match length + offset tokens. min_token_prob: of a draft token, on its path. use_tree_spec: a tree
    instead of a path.
    """

    max_tree_depth: int
    max_spec_factor: float
    max_spec_offset: float
    min_token_prob: float
    use_tree_spec: bool


AS_SHIPPED = SuffixTreeSettings(24, 1.0, 0.0, 0.1, use_tree_spec=False)
"""vLLM's defaults: a path, no longer than the match."""

LOOSENED = SuffixTreeSettings(64, 4.0, 8.0, 0.003, use_tree_spec=True)
"""A tree, and longer drafts of less likely tokens, which raises tokens per step at 16 nodes."""

AS_TREE = SuffixTreeSettings(24, 4.0, 8.0, 0.003, use_tree_spec=True)
"""The tree of the shipped depth, asked as the loosened one: cheaper in time and memory than that."""


def is_installed() -> bool:
    try:
        importlib.import_module(_MODULE)
    except ImportError:
        return False
    return True


class SuffixTreeDrafter:
    """Holds every completion in one suffix tree and each running request in another; nothing is ever forgotten."""

    def __init__(self, settings: SuffixTreeSettings) -> None:
        self.settings = settings
        self._cache: Any = importlib.import_module(_MODULE).SuffixDecodingCache(
            max_tree_depth=settings.max_tree_depth, max_cached_requests=-1
        )
        self._running: dict[Hashable, _Context] = {}
        self._started = 0
        self.tokens_learnt = 0

    def start(self, request_id: Hashable, prompt: NDArray[np.int32], group_id: Hashable = None) -> None:
        """Groups mean nothing to it."""
        if request_id in self._running:
            self.finish(request_id)
        # A name that came before would drop what was learnt under it.
        self._started += 1
        self._running[request_id] = _Context(self._started, self.settings.max_tree_depth)
        self._running[request_id].append(prompt)
        self._cache.start_request(self._started, np.ascontiguousarray(prompt, np.int32))

    def extend(self, request_id: Hashable, tokens: NDArray[np.int32]) -> None:
        context = self._running[request_id]
        context.append(tokens)
        self._cache.add_active_response(context.number, np.ascontiguousarray(tokens, np.int32))
        self.tokens_learnt += len(tokens)

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]:
        settings, trees = self.settings, []
        for name, budget in zip(request_ids, budgets, strict=True):
            context = self._running[name]
            draft = self._cache.speculate(
                context.number,
                context.tokens(),
                max_spec_tokens=budget,
                max_spec_factor=settings.max_spec_factor,
                max_spec_offset=settings.max_spec_offset,
                min_token_prob=settings.min_token_prob,
                use_tree_spec=settings.use_tree_spec,
            )
            trees.append(DraftTree(draft.token_ids, draft.parents, draft.probs))
        return trees

    def finish(self, request_id: Hashable) -> None:
        self._cache.stop_request(self._running.pop(request_id).number)

    @property
    def memory_bytes(self) -> int:
        """Of the tree of all completions, by its own count. It walks the tree: slow."""
        return int(self._cache._global_tree.estimate_memory())


class _Context:
    """The last tokens of a request, as many as the tree can match."""

    def __init__(self, number: int, depth: int) -> None:
        self.number = number
        self._depth = depth
        self._tokens = np.empty(8 * depth, np.int32)
        self._end = 0

    def append(self, tokens: NDArray[np.int32]) -> None:
        tokens = tokens[-self._depth :]
        if self._end + len(tokens) > len(self._tokens):
            kept = self.tokens().copy()
            self._tokens[: len(kept)] = kept
            self._end = len(kept)
        self._tokens[self._end : self._end + len(tokens)] = tokens
        self._end += len(tokens)

    def tokens(self) -> NDArray[np.int32]:
        return self._tokens[max(0, self._end - self._depth) : self._end]
