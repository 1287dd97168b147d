"""What was learnt from outputs: the counts, their ages, and how to read them. Saves, loads and merges."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, HistoryError
from . import calibration, counts, mixture
from .history_file import HistoryFile, read_file, write_file
from .reserved import map_file, reserve

BYTES_PER_TOKEN = 128
"""Room for a token of capacity; text that repeats itself needs less, so that more tokens fit."""

_LINE_BYTES = counts.LINE * counts.SLOT_BYTES
_FIRST_LINES = 256
_TICKS_PER_CAPACITY = 64
_LEAST_AGE = np.float32(0.05)


@dataclass(frozen=True)
class HistoryFacts:
    """What a history holds."""

    tokens: int  # output tokens learnt, forgotten ones included
    pairs: int  # of a context and a token that followed it, held now
    groups: int  # prompts with evidence of their own
    weight_version: int
    weight_updates: int
    table_bytes: int


class History:
    """The learnt state, apart from the requests that run. Counts take BYTES_PER_TOKEN for each token of capacity."""

    def __init__(self, capacity_tokens: int, version_decay: float) -> None:
        self.capacity_tokens = capacity_tokens
        self.version_decay = np.float32(version_decay)
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        most_lines = max(2, self.capacity_tokens * BYTES_PER_TOKEN // _LINE_BYTES)
        first_lines = min(_FIRST_LINES, most_lines)
        try:
            self._region = reserve(most_lines * _LINE_BYTES)
        except (OSError, OverflowError, MemoryError) as error:
            raise ConfigError(
                f"DraftConfig.capacity_tokens of {self.capacity_tokens} needs room for {most_lines * _LINE_BYTES} "
                f"bytes, which the system refused ({error}); take fewer"
            ) from error
        self.slots: NDArray[np.int64] = self._region.view(np.int64).reshape(-1, 2)
        self.control = np.zeros(counts.CONTROL_SIZE, np.int64)
        self.control[counts.LINES] = first_lines
        self.control[counts.MASK] = _mask(first_lines)
        self.control[counts.MAX_LINES] = most_lines
        self.control[counts.TOKENS_PER_TICK] = max(1, self.capacity_tokens // _TICKS_PER_CAPACITY)
        self.ages = np.ones(counts.TICKS, np.float32)
        self.weights = mixture.initial_weights()
        self.calibration = calibration.identity()
        self.weight_version = 0
        self.weight_updates = 0

    def new_version(self, version: int) -> None:
        """Ages all counts by version_decay."""
        self.weight_version = int(version)
        self.weight_updates += 1
        np.maximum(self.ages * self.version_decay, _LEAST_AGE, out=self.ages)
        counts.advance_tick(self.slots, self.control, self.ages)

    @property
    def used_slots(self) -> NDArray[np.int64]:
        """int64[slots, 2]: the table as far as it has grown."""
        return self.slots[: int(self.control[counts.LINES]) * counts.LINE]

    @property
    def memory_bytes(self) -> int:
        """Bytes in use."""
        return self.used_slots.nbytes + sum(array.nbytes for array in self._small_arrays().values())

    def facts(self) -> HistoryFacts:
        """What it holds."""
        groups = np.unique(counts.unpacked(self.used_slots, self.ages)["group"])
        return HistoryFacts(
            int(self.control[counts.TOKENS]),
            int(self.control[counts.USED]),
            int(np.count_nonzero(groups != counts.SHARED)),
            self.weight_version,
            self.weight_updates,
            self.used_slots.nbytes,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything to one file, which appears whole or not at all."""
        facts = {"weight_version": self.weight_version, "weight_updates": self.weight_updates}
        # The table comes last, so that what a mapping of it has beyond its end is zeros.
        write_file(path, facts, {**self._small_arrays(), "slots": self.used_slots})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces everything by a saved history. Raises HistoryError, and keeps what it has, if it can't.

        The table is mapped, not read, where it fits; a larger one is cut down to the pairs worth most.
        """
        with open(path, "rb") as opened:
            file = self._read(opened)
            saved, slots = file.arrays["control"], file.arrays["slots"]
            self.clear()
            self.weight_version = file.facts["weight_version"]
            self.weight_updates = file.facts["weight_updates"]
            self.ages[:] = file.arrays["ages"]
            self.weights[:] = file.arrays["weights"]
            self.calibration[:] = file.arrays["calibration"]
            kept = [counts.TICK, counts.TOKENS, counts.TOKENS_AT_TICK]
            fits = len(slots) <= len(self.slots)
            if fits:
                if not map_file(self._region, opened, file.offsets["slots"], slots.nbytes):
                    self.slots[: len(slots)] = slots
                kept += [counts.LINES, counts.MASK, counts.USED]
            self.control[kept] = saved[kept]
        if not fits:
            self._insert(file)

    def merge(self, path: str | os.PathLike[str]) -> None:
        """Adds the counts of a saved history. Raises HistoryError, and keeps what it has, if it can't.

        Weights and calibration stay this one's.
        """
        with open(path, "rb") as opened:
            file = self._read(opened)
        self._insert(file)
        self.control[counts.TOKENS] += file.arrays["control"][counts.TOKENS]

    def _insert(self, file: HistoryFile) -> None:
        theirs, control, ages = (np.array(file.arrays[name]) for name in ("slots", "control", "ages"))
        counts.insert_all(self.slots, self.control, self.ages, theirs, control, ages)

    def _small_arrays(self) -> dict[str, NDArray[Any]]:
        return {
            "control": self.control,
            "ages": self.ages,
            "weights": self.weights,
            "calibration": self.calibration,
        }

    def _read(self, opened: BinaryIO) -> HistoryFile:
        file = read_file(opened)
        expected = {name: (array.dtype, array.shape) for name, array in self._small_arrays().items()}
        faults = [
            f"{name} of {dtype}{shape}"
            for name, (dtype, shape) in expected.items()
            if name not in file.arrays or (file.arrays[name].dtype, file.arrays[name].shape) != (dtype, shape)
        ]
        slots = file.arrays.get("slots")
        if slots is None or slots.dtype != np.int64 or slots.ndim != 2 or slots.shape[1] != 2:
            faults.append("slots of int64[n, 2]")
        elif not faults:
            faults = _control_faults(file.arrays["control"], len(slots))
        for name in ("weight_version", "weight_updates"):
            if type(file.facts.get(name)) is not int:
                faults.append(f"the fact {name}, a whole number")
        if faults:
            raise HistoryError(f"{opened.name} holds no trie's history: expected {', '.join(faults)}")
        return file


def _control_faults(control: NDArray[np.int64], slots: int) -> list[str]:
    """What a table of so many slots can't have in its control array."""
    lines = int(control[counts.LINES])
    sound = (
        lines > 0
        and lines * counts.LINE == slots
        and int(control[counts.MASK]) == _mask(lines)
        and 0 <= control[counts.USED] <= slots
        and 0 <= control[counts.TICK] < counts.TICKS
        and 0 <= control[counts.TOKENS_AT_TICK] <= control[counts.TOKENS]
    )
    return [] if sound else [f"a control array that fits {slots} slots"]


def _mask(lines: int) -> int:
    """2**k - 1 for the power of two at or above lines."""
    return (1 << (lines - 1).bit_length()) - 1
