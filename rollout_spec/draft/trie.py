"""A drafter from counted continuations (dictionary form)."""

from __future__ import annotations

import heapq
import os
import zipfile
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ..errors import DraftError, HistoryError, UnknownRequestError
from ..tree import DraftTree
from .config import DraftConfig
from .drafter import TokenSequence

_LENGTHS = (1, 2, 3, 4, 6, 8, 10)


class TrieDrafter:
    """Drafts the continuations that followed the same contexts before."""

    def __init__(self, config: DraftConfig | None = None) -> None:
        self.config = config or DraftConfig()
        self._lengths = [n for n in _LENGTHS if n <= self.config.max_match]
        self._tables: dict[Any, dict[tuple[int, ...], dict[int, int]]] = {}
        self._text: dict[Hashable, list[int]] = {}
        self._group: dict[Hashable, Any] = {}
        self._log: list[tuple[str, list[int]]] = []

    def start(self, request_id: Hashable, prompt: TokenSequence, group_id: Hashable = None) -> None:
        text = np.asarray(prompt).tolist()
        self._text[request_id] = text
        self._group[request_id] = repr(tuple(text) if group_id is None else group_id)
        own = self._tables[("own", request_id)] = {}
        for i in range(len(text)):
            self._count(own, text, i)

    def extend(self, request_id: Hashable, tokens: TokenSequence) -> None:
        text = self._known(request_id)
        context = text[-max(self._lengths) :]
        new = np.asarray(tokens).tolist()
        for token in new:
            text.append(token)
            for table in self._sources(request_id):
                self._count(table, text, len(text) - 1)
        self._log.append((self._group[request_id], context + new))

    def finish(self, request_id: Hashable) -> None:
        self._known(request_id)
        del self._text[request_id], self._group[request_id], self._tables[("own", request_id)]

    def new_version(self, version: int) -> None:
        del version

    @property
    def memory_bytes(self) -> int:
        return 700 * sum(len(tokens) for _, tokens in self._log)

    def save(self, path: str | os.PathLike[str]) -> None:
        with open(path, "wb") as file:
            np.savez(
                file,
                groups=np.array([group for group, _ in self._log] or [""]),
                lengths=np.array([len(tokens) for _, tokens in self._log], np.int64),
                tokens=np.array([token for _, tokens in self._log for token in tokens], np.int64),
            )

    def load(self, path: str | os.PathLike[str]) -> None:
        try:
            with np.load(path, allow_pickle=False) as file:
                groups, lengths, tokens = file["groups"], file["lengths"], file["tokens"].tolist()
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise HistoryError(f"{os.fspath(path)} is not a whole history file: {error}") from error
        self._tables, self._log, begin = {}, [], 0
        for group, length in zip(groups.tolist(), lengths.tolist(), strict=False):
            piece = tokens[begin : begin + length]
            begin += length
            self._log.append((group, piece))
            for i in range(len(piece)):
                for key in ("all", ("group", group)):
                    self._count(self._tables.setdefault(key, {}), piece, i)

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]:
        if len(request_ids) != len(budgets):
            raise DraftError(f"{len(request_ids)} requests but {len(budgets)} budgets")
        return [self._tree(r, int(b)) for r, b in zip(request_ids, budgets, strict=True)]

    def _known(self, request_id: Hashable) -> list[int]:
        if request_id not in self._text:
            raise UnknownRequestError(f"request {request_id!r} is not known to the drafter; start it first")
        return self._text[request_id]

    def _sources(self, request_id: Hashable) -> list[dict[tuple[int, ...], dict[int, int]]]:
        keys = ("all", ("group", self._group[request_id]), ("own", request_id))
        return [self._tables.setdefault(key, {}) for key in keys]

    def _count(self, table: dict[tuple[int, ...], dict[int, int]], text: list[int], i: int) -> None:
        for n in self._lengths:
            if n > i:
                break
            followers = table.setdefault(tuple(text[i - n : i]), {})
            followers[text[i]] = followers.get(text[i], 0) + 1

    def _predict(self, request_id: Hashable, context: list[int]) -> dict[int, float]:
        probs: dict[int, float] = {}
        left = 1.0
        for n in reversed(self._lengths):
            for table in reversed(self._sources(request_id)):
                followers = table.get(tuple(context[-n:])) if n <= len(context) else None
                if followers:
                    total = sum(followers.values()) + 1.0
                    for token, count in followers.items():
                        probs[token] = probs.get(token, 0.0) + left * 0.6 * count / total
                    left *= 0.4
        return probs

    def _tree(self, request_id: Hashable, budget: int) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[float] = []
        frontier: list[tuple[float, int, int]] = []
        longest = max(self._lengths)
        contexts = {-1: self._known(request_id)[-longest:]}

        def expand(node: int, reached: float) -> None:
            followers = self._predict(request_id, contexts[node])
            if followers and not self.config.branching:
                best = max(followers, key=lambda token: followers[token])
                followers = {best: followers[best]}
            for token, p in followers.items():
                if reached * p > self.config.min_prob:
                    heapq.heappush(frontier, (-reached * p, node, token))

        expand(-1, 1.0)
        while frontier and len(tokens) < budget:
            p, parent, token = heapq.heappop(frontier)
            tokens.append(token)
            parents.append(parent)
            probs.append(-p)
            contexts[len(tokens) - 1] = (contexts[parent] + [token])[-longest:]
            expand(len(tokens) - 1, -p)
        tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probs, np.float32))
        return tree.depth_first()
