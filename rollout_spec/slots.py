"""What a step needs to know of each running sequence and that seldom changes, by slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .kernels.sampling import SequenceSampling
from .requests import Sequence

_WORD = 2**32 - 1


class SlotTable:
    """Page tables and sampling parameters of the running sequences, ready to be copied into a step."""

    def __init__(self, slots: int, pages_per_sequence: int) -> None:
        self.pages_per_sequence = pages_per_sequence
        self.page_table = np.zeros((slots, pages_per_sequence), np.int32)
        self._pages_set = np.zeros(slots, np.int32)
        self._passed = np.zeros(slots, np.int32)
        self._sampling = {
            "slots": np.arange(slots, dtype=np.int32),
            "seeds": np.zeros((slots, 2), np.uint32),
            "temperature": np.zeros(slots, np.float32),
            "top_k": np.zeros(slots, np.int32),
            "top_p": np.ones(slots, np.float32),
            "min_p": np.zeros(slots, np.float32),
            "repetition_penalty": np.ones(slots, np.float32),
            "presence_penalty": np.zeros(slots, np.float32),
            "frequency_penalty": np.zeros(slots, np.float32),
            "stop_from_position": np.zeros(slots, np.int32),
            "uses_tables": np.zeros(slots, np.int32),
        }

    def update(self, sequence: Sequence) -> None:
        """Takes note of a sequence that was admitted, and of its new pages."""
        slot, pages = sequence.slot, sequence.pages
        if not sequence.slot_written:
            self._write(sequence)
            sequence.slot_written = True
            self._pages_set[slot] = self._passed[slot] = 0
        if self._passed[slot] != sequence.passed:
            self._passed[slot] = sequence.passed
            self._pages_set[slot] = 0
        known = self._pages_set[slot]
        if known != len(pages):
            self.page_table[slot, known : len(pages)] = pages[known:]
            self._pages_set[slot] = len(pages)

    def fill(self, slots: NDArray[np.int64], sampling: SequenceSampling) -> None:
        """Copies the sampling parameters of `slots`, int64[n], into the first n entries of a step's."""
        for name, values in self._sampling.items():
            getattr(sampling, name)[: len(slots)] = values[slots]

    def _write(self, sequence: Sequence) -> None:
        slot, sampling = sequence.slot, sequence.sampling
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            self._sampling[name][slot] = getattr(sampling, name)
        self._sampling["seeds"][slot] = sequence.seed & _WORD, sequence.seed >> 32
        self._sampling["stop_from_position"][slot] = sequence.prompt_len + sampling.min_tokens
        self._sampling["uses_tables"][slot] = sampling.changes_logits and sequence.score_from is None
