"""The drafter: history, groups and the request's own text, blended into a tree of likely continuations."""

from __future__ import annotations

import hashlib
import itertools
import numbers
import os
import threading
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import DraftError, UnknownRequestError
from ..tree import MAX_NODES, DraftTree
from . import counts, kernels, state
from .config import DraftConfig
from .drafter import TokenSequence
from .history import History, HistoryFacts
from .own import SMALLEST_ROWS, OwnTexts, move_text
from .threads import MOST_THREADS, run_in_parts
from .workspace import new_workspace

_DRAFTS_PER_THREAD = 8


class TrieDrafter:
    """Drafts what followed the same contexts before: everywhere, in the request's group, in the request itself.

    See `Drafter` for the calls. They may come from several threads; a lock lets one in at a time. Memory has a
    hard cap that `DraftConfig.capacity_tokens` sets for the history; requests that run hold their own text besides.
    """

    def __init__(self, config: DraftConfig | None = None) -> None:
        self.config = DraftConfig() if config is None else config
        self._lock = threading.Lock()
        self._history = History(self.config.capacity_tokens, self.config.version_decay)
        self._texts = OwnTexts()
        self._rows: dict[Hashable, int] = {}
        self._requests = np.zeros((16, state.ROW_SIZE), np.int64)
        self._free_rows = list(range(len(self._requests)))
        self._drafts = np.zeros((len(self._requests), MAX_NODES), state.NODE)
        self._workspaces = [new_workspace() for _ in range(MOST_THREADS)]

    def start(self, request_id: Hashable, prompt: TokenSequence, group_id: Hashable = None) -> None:
        """Begins a request, or begins it anew. Without a group_id, equal prompts are a group."""
        tokens = _token_array(prompt)
        group = _number(tokens.tobytes() if group_id is None else repr(_plain(group_id)).encode())
        with self._lock:
            if request_id in self._rows:
                self._release(request_id)
            if not self._free_rows:
                self._free_rows = list(range(len(self._requests), 2 * len(self._requests)))
                self._drafts = np.concatenate([self._drafts, np.zeros_like(self._drafts)])
                self._requests = np.concatenate([self._requests, np.zeros_like(self._requests)])
            row = self._free_rows.pop()
            self._rows[request_id] = row
            self._requests[row] = 0
            self._requests[row, state.GROUP] = group
            rows = _rows_for(len(tokens) + SMALLEST_ROWS)
            self._requests[row, state.OWN_FIRST] = self._texts.allocate(rows)
            self._requests[row, state.OWN_ROWS] = rows
            kernels.learn_prompt(self._state(), row, tokens)

    def extend(self, request_id: Hashable, tokens: TokenSequence) -> None:
        """Learns the request's next tokens. Raises UnknownRequestError for a request that was not started."""
        self.extend_all([request_id], [tokens])

    def extend_all(self, request_ids: Sequence[Hashable], tokens: Sequence[TokenSequence]) -> None:
        """`extend` for each of several requests, in one call."""
        parts = [np.asarray(part) for part in tokens]
        new = _token_array(np.concatenate(parts) if len(parts) > 1 else parts[0])
        ends = list(itertools.accumulate(map(len, parts)))
        with self._lock:
            batch = [self._row(request_id) for request_id in request_ids]
            for row, part in zip(batch, parts, strict=True):
                self._make_room(row, len(part))
            kernels.learn_all(
                self._state(),
                np.array(batch, np.int64),
                new,
                np.array(ends, np.int64),
                self.config.max_match,
                self._workspaces[0],
            )

    def familiar_tokens(self, request_ids: Sequence[Hashable]) -> list[int]:
        """For each request, how many of its last output tokens in a row were met behind a context known before.

        Much cheaper than a proposal, it tells that a text has begun to repeat.
        """
        with self._lock:
            rows = [self._row(request_id) for request_id in request_ids]
            return self._requests[rows, state.FAMILIAR].tolist()

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]:
        """A tree for each request, of at most its budget and at most `MAX_NODES` nodes."""
        if len(request_ids) != len(budgets):
            raise DraftError(f"expected a budget for each of {len(request_ids)} requests, got {len(budgets)}")
        limits = np.minimum(np.asarray(budgets, np.int64), MAX_NODES)
        most = int(limits.max(initial=0))
        if most <= 0:
            with self._lock:
                return [DraftTree() for request_id in request_ids if self._row(request_id) >= 0]
        shape = (len(request_ids), most)
        tokens, parents = np.empty(shape, np.int32), np.empty(shape, np.int32)
        probs, sizes = np.empty(shape, np.float32), np.empty(len(request_ids), np.int64)
        with self._lock:
            batch = np.array([self._row(request_id) for request_id in request_ids], np.int64)
            arrays = self._state()

            def draft(number: int, part: slice) -> None:
                kernels.draft(
                    arrays,
                    batch[part],
                    limits[part],
                    self.config.max_match,
                    self.config.branching,
                    self.config.min_prob,
                    tokens[part],
                    parents[part],
                    probs[part],
                    sizes[part],
                    self._workspaces[number],
                )

            # A request that is named twice keeps one draft, which only one thread may write.
            least = _DRAFTS_PER_THREAD if len(np.unique(batch)) == len(batch) else len(batch)
            run_in_parts(draft, len(batch), least)
        return [
            DraftTree(tokens[i, :size], parents[i, :size], probs[i, :size])
            for i, size in enumerate(sizes.tolist())
        ]

    def finish(self, request_id: Hashable) -> None:
        """Drops the request's private context; what its outputs taught the history stays."""
        with self._lock:
            self._row(request_id)
            self._release(request_id)

    def new_version(self, version: int) -> None:
        """Ages what was learnt before by `DraftConfig.version_decay`."""
        with self._lock:
            self._history.new_version(version)

    @property
    def memory_bytes(self) -> int:
        """Bytes in use by the history, the running requests and the weights."""
        with self._lock:
            others = self._requests.nbytes + self._drafts.nbytes
            return self._history.memory_bytes + self._texts.memory_bytes + others

    @property
    def tokens_learnt(self) -> int:
        """Output tokens learnt so far, forgotten ones included."""
        return int(self._history.control[counts.TOKENS])

    def facts(self) -> HistoryFacts:
        """What the history holds; looks at all of it."""
        with self._lock:
            return self._history.facts()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the history, without the running requests, to one file."""
        with self._lock:
            self._history.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces the history by a saved one. Raises HistoryError, and keeps what it has, if it can't.

        The file is memory-mapped where the system can. It is never written, and nobody else may write into it or cut
        it short while it is in use: replace it by renaming, as `save` does. A history too large for this drafter's
        capacity is cut down to the pairs worth most.
        """
        with self._lock:
            self._history.load(path)

    def merge(self, path: str | os.PathLike[str]) -> None:
        """Adds what a saved history knows. Raises HistoryError, and keeps what it has, if it can't."""
        with self._lock:
            self._history.merge(path)

    def _state(self) -> state.State:
        history = self._history
        return state.State(
            history.slots,
            history.control,
            history.ages,
            history.weights,
            history.calibration,
            self._texts.rows,
            self._requests,
            self._drafts,
        )

    def _row(self, request_id: Hashable) -> int:
        row = self._rows.get(request_id)
        if row is None:
            raise UnknownRequestError(
                f"request {request_id!r} is not known to the drafter: it was never started or has finished"
            )
        return row

    def _release(self, request_id: Hashable) -> None:
        row = self._rows.pop(request_id)
        first, rows = self._requests[row, [state.OWN_FIRST, state.OWN_ROWS]].tolist()
        self._texts.free(first, rows)
        self._free_rows.append(row)

    def _make_room(self, row: int, new: int) -> None:
        """Gives a request a larger block for its text where `new` more tokens don't fit."""
        requests = self._requests
        rows, length = int(requests[row, state.OWN_ROWS]), int(requests[row, state.LENGTH])
        if length + new <= rows:
            return
        first = int(requests[row, state.OWN_FIRST])
        larger = _rows_for(length + new)
        moved = self._texts.allocate(larger)
        move_text(self._texts.rows, self._requests[row], moved, larger)
        self._texts.free(first, rows)


def _rows_for(tokens: int) -> int:
    """Rows of a block for so many tokens: a power of two."""
    return max(SMALLEST_ROWS, 1 << (tokens - 1).bit_length())


def _token_array(tokens: TokenSequence) -> NDArray[np.int32]:
    """int32[T], contiguous and writable, as compiled; raises DraftError for all but a sequence of ids in [0, 2**31)."""
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DraftError(
            f"expected a flat sequence of token ids, got shape {array.shape} and dtype {array.dtype}"
        )
    if array.size and (array.min() < 0 or array.max() >= 1 << 31):
        raise DraftError(f"token ids must lie in [0, 2**31), they range over {array.min()} to {array.max()}")
    return np.require(array, np.int32, ["C", "W"])


def _number(group: bytes) -> int:
    """A number in [1, 2**16) that is the same in every process."""
    digest = hashlib.blake2b(group, digest_size=8).digest()
    return int.from_bytes(digest, "little") % ((1 << 16) - 1) + 1


def _plain(value: object) -> object:
    """Numbers and strings of numpy as Python's own, whose repr they differ from though they are equal."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple):
        return tuple(_plain(part) for part in value)
    return value
