"""The drafter: history, groups and the request's own text, blended into a tree of likely continuations."""

from __future__ import annotations

import hashlib
import numbers
import os
import threading
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import DraftError, HistoryError, UnknownRequestError
from ..tree import MAX_NODES, DraftTree
from . import calibration, counts, kernels, mixture, state
from .config import DraftConfig
from .drafter import TokenSequence
from .history_file import read_arrays, write_arrays
from .private import SMALLEST_LINES, PrivateTables

BYTES_PER_TOKEN = 128
"""Room in the history for a token of capacity; text that repeats itself needs less, so holds more tokens."""

_FIRST_LINES = 256
_TICKS_PER_CAPACITY = 64
_LEAST_AGE = np.float32(0.05)


class TrieDrafter:
    """Drafts what followed the same contexts before: everywhere, in the request's group, in the request itself.

    See `Drafter` for the calls. They may come from several threads; a lock lets one in at a time. Memory has a
    hard cap that `DraftConfig.capacity_tokens` sets for the history; requests that run hold their own besides.
    """

    def __init__(self, config: DraftConfig | None = None) -> None:
        self.config = DraftConfig() if config is None else config
        self._lock = threading.Lock()
        self._private = PrivateTables()
        self._rows: dict[Hashable, int] = {}
        self._requests = np.zeros((16, state.ROW_SIZE), np.int64)
        self._free_rows = list(range(len(self._requests)))
        self._drafts = np.zeros((len(self._requests), MAX_NODES), state.NODE)
        self._version = 0
        self._clear_history()

    def _clear_history(self) -> None:
        capacity = self.config.capacity_tokens
        most_lines = max(2, capacity * BYTES_PER_TOKEN // (counts.LINE * counts.SLOT.itemsize))
        # Reserved, not used: the system gives memory to pages that are written, and the table grows from its start.
        self._history = np.zeros(most_lines * counts.LINE, counts.SLOT)
        self._control = np.zeros(counts.CONTROL_SIZE, np.int64)
        self._control[[counts.OLD_LINES, counts.LINES]] = min(_FIRST_LINES, most_lines)
        self._control[counts.MAX_LINES] = most_lines
        self._control[counts.TOKENS_PER_TICK] = max(1, capacity // _TICKS_PER_CAPACITY)
        self._ages = np.ones(1 << 16, np.float32)
        self._calibration = calibration.identity()
        self._weights = np.zeros((mixture.BUCKETS, mixture.WEIGHTS), np.float32)

    def start(self, request_id: Hashable, prompt: TokenSequence, group_id: Hashable = None) -> None:
        """Begins a request, or begins it anew. Without a group_id, equal prompts are a group."""
        tokens = _token_array(prompt)
        group = _group_number(tokens.tobytes() if group_id is None else group_id)
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
            self._requests[row, state.OWN_FIRST] = self._private.allocate(SMALLEST_LINES)
            self._requests[row, state.OWN_LINES] = SMALLEST_LINES
            self._learn(row, tokens, is_output=False)

    def extend(self, request_id: Hashable, tokens: TokenSequence) -> None:
        """Learns the request's next tokens. Raises UnknownRequestError for a request that was not started."""
        new = _token_array(tokens)
        with self._lock:
            self._learn(self._row(request_id), new, is_output=True)

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]:
        """A tree for each request, of at most its budget and at most `MAX_NODES` nodes."""
        if len(request_ids) != len(budgets):
            raise DraftError(f"expected a budget for each of {len(request_ids)} requests, got {len(budgets)}")
        limits = np.minimum(np.asarray(budgets, np.int64), MAX_NODES)
        most = int(limits.max(initial=0))
        if most <= 0:
            return [DraftTree() for _ in request_ids]
        shape = (len(request_ids), most)
        tokens, parents = np.empty(shape, np.int32), np.empty(shape, np.int32)
        probs = np.empty(shape, np.float32)
        with self._lock:
            batch = np.array([self._row(request_id) for request_id in request_ids], np.int64)
            sizes = kernels.draft(
                self._state(),
                batch,
                limits,
                self.config.max_match,
                self.config.branching,
                self.config.min_prob,
                tokens,
                parents,
                probs,
            )
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
            self._version = version
            np.maximum(self._ages * np.float32(self.config.version_decay), _LEAST_AGE, out=self._ages)
            self._control[counts.TICK] = (self._control[counts.TICK] + 1) & 0xFFFF
            self._ages[self._control[counts.TICK]] = 1

    @property
    def memory_bytes(self) -> int:
        """Bytes in use by the history, the running requests and the weights."""
        history_bytes = int(self._control[counts.LINES]) * counts.LINE * counts.SLOT.itemsize
        others = (self._ages, self._weights, self._requests, self._control)
        return history_bytes + self._private.memory_bytes + sum(array.nbytes for array in others)

    @property
    def tokens_learnt(self) -> int:
        """Output tokens learnt so far, forgotten ones included."""
        return int(self._control[counts.TOKENS])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the history, without the running requests, to one file."""
        with self._lock:
            used = int(self._control[counts.LINES]) * counts.LINE
            facts = {"weight_version": self._version}
            arrays: dict[str, NDArray] = {
                "slots": self._history[:used].view(np.uint8),
                "control": self._control,
                "ages": self._ages,
                "weights": self._weights,
                "calibration": self._calibration,
            }
            write_arrays(path, facts, arrays)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces the history by a saved one. Raises HistoryError, and keeps what it has, if it can't.

        A history too large for this drafter's capacity is cut down to the pairs worth most.
        """
        facts, arrays = read_arrays(path)
        expected: dict[str, NDArray] = {
            "control": self._control,
            "ages": self._ages,
            "weights": self._weights,
        }
        expected["calibration"] = self._calibration
        faults = [
            f"{name} of {like.dtype}{like.shape}"
            for name, like in expected.items()
            if name not in arrays or (arrays[name].dtype, arrays[name].shape) != (like.dtype, like.shape)
        ]
        if "slots" not in arrays or arrays["slots"].dtype != np.uint8:
            faults.append("slots of uint8")
        if faults:
            raise HistoryError(f"{os.fspath(path)} holds no trie's history: expected {', '.join(faults)}")
        with self._lock:
            self._clear_history()
            saved, slots = arrays["control"], arrays["slots"].view(counts.SLOT)
            self._version = int(facts["weight_version"])
            self._ages[:] = arrays["ages"]
            self._weights[:] = arrays["weights"]
            self._calibration[:] = arrays["calibration"]
            kept = [counts.TICK, counts.TOKENS, counts.TOKENS_AT_TICK]
            if len(slots) <= len(self._history):
                self._history[: len(slots)] = slots
                kept += [counts.OLD_LINES, counts.LINES, counts.MIGRATING, counts.USED]
            self._control[kept] = saved[kept]
            if len(slots) > len(self._history):
                kernels.insert_all(self._history, self._control, slots.copy())

    def _state(self) -> state.State:
        return state.State(
            self._history,
            self._control,
            self._ages,
            self._weights,
            self._calibration,
            self._private.slots,
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
        first, lines = self._requests[row, [state.OWN_FIRST, state.OWN_LINES]].tolist()
        self._private.free(first, lines)
        self._free_rows.append(row)

    def _learn(self, row: int, tokens: NDArray[np.int32], is_output: bool) -> None:
        done = 0
        while True:
            done += kernels.learn(
                self._state(),
                row,
                tokens[done:],
                self.config.max_match,
                is_output,
            )
            if done == len(tokens):
                return
            self._double_private_table(row)

    def _double_private_table(self, row: int) -> None:
        first, lines = self._requests[row, [state.OWN_FIRST, state.OWN_LINES]].tolist()
        larger = self._private.allocate(2 * lines)
        kernels.rehash(self._private.slots, first, lines, larger, 2 * lines)
        self._private.free(first, lines)
        self._requests[row, state.OWN_FIRST] = larger
        self._requests[row, state.OWN_LINES] = 2 * lines


def _token_array(tokens: TokenSequence) -> NDArray[np.int32]:
    """int32[T], contiguous; raises DraftError for anything but a sequence of ids in [0, 2**31)."""
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DraftError(
            f"expected a flat sequence of token ids, got shape {array.shape} and dtype {array.dtype}"
        )
    if array.size and (array.min() < 0 or array.max() >= 1 << 31):
        raise DraftError(f"token ids must lie in [0, 2**31), they range over {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, np.int32)


def _group_number(group_id: Hashable) -> int:
    """A number in [1, 2**16) that is the same for equal ids in every process, for ids whose repr is."""
    digest = hashlib.blake2b(repr(_plain(group_id)).encode(), digest_size=8).digest()
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
