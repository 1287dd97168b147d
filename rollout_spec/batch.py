"""Packs what the scheduler planned into a step's arrays."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .kernels.sampling import SampleRows, SequenceSampling
from .requests import Sequence
from .step import StepBatch, StepShape
from .tree import DraftTree, ancestor_words

_CAUSAL = 0xFFFFFFFF
_WORD = 2**32 - 1


@dataclass(eq=False)
class StepEntry:
    """One sequence's part of a step: the next `count` of its uncached tokens, and a tree below the last."""

    sequence: Sequence
    count: int
    tree: DraftTree | None = None
    first_row: int = 0
    """Its first row in the step, set by `pack`."""

    @property
    def num_tokens(self) -> int:
        return self.count + (len(self.tree) if self.tree is not None else 0)

    @property
    def scored(self) -> range:
        """Positions in the text whose log-probabilities this entry yields (sequences that score)."""
        sequence = self.sequence
        if sequence.score_from is None:
            return range(0)
        start = max(sequence.cached + 1, sequence.score_from)
        return range(start, max(start, min(sequence.cached + self.count + 1, sequence.length)))

    @property
    def samples(self) -> bool:
        """Whether its last known token is in the step, so that the next can be sampled."""
        return self.sequence.score_from is None and self.count == self.sequence.uncached

    @property
    def num_rows(self) -> int:
        if self.sequence.score_from is not None:
            return len(self.scored)
        return self.num_tokens - self.count + 1 if self.samples else 0


def _filled(value: int, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
    """A numpy array where the type says jax array: the jitted step takes either."""
    return np.full(shape, value, dtype)


def pack(entries: SequenceOf[StepEntry], shape: StepShape, pages_per_sequence: int) -> StepBatch:
    """The arrays of a step of `shape`; the entries must fit it."""
    tokens, positions = _filled(0, shape.tokens, np.int32), _filled(0, shape.tokens, np.int32)
    ancestors = _filled(_CAUSAL, (shape.tokens, 2), np.uint32)
    cu_q_lens, kv_lens = _filled(0, shape.sequences + 1, np.int32), _filled(0, shape.sequences, np.int32)
    page_table = _filled(0, (shape.sequences, pages_per_sequence), np.int32)
    row_tokens, row_sources = _filled(0, shape.rows, np.int32), _filled(0, shape.rows, np.int32)
    row_in_use = _filled(0, shape.rows, np.bool_)
    rows = SampleRows(
        token_ids=_filled(0, shape.rows, np.int32),
        parents=_filled(-1, shape.rows, np.int32),
        sequences=_filled(0, shape.rows, np.int32),
        positions=_filled(0, shape.rows, np.int32),
        targets=_filled(0, shape.rows, np.int32),
    )
    token, row = 0, 0
    for number, entry in enumerate(entries):
        sequence = entry.sequence
        first, count = sequence.cached, entry.count
        here = slice(token, token + count)
        tokens[here] = sequence.tokens[first : first + count]
        positions[here] = np.arange(first, first + count)
        kv_lens[number] = first + entry.num_tokens
        page_table[number, : len(sequence.pages)] = sequence.pages
        entry.first_row = row
        if sequence.score_from is not None:
            scored = np.array(entry.scored, np.int32)
            used = slice(row, row + len(scored))
            row_tokens[used] = token + scored - 1 - first
            rows.targets[used] = sequence.tokens[scored]
            rows.positions[used] = scored
        elif entry.samples:
            used = slice(row, row + entry.num_rows)
            row_tokens[used] = np.arange(token + count - 1, token + entry.num_tokens)
            row_sources[used] = first + np.arange(count - 1, entry.num_tokens)
            rows.token_ids[row] = tokens[token + count - 1]
            rows.positions[row] = first + count
            if entry.tree is not None and len(entry.tree):
                tree = entry.tree
                nodes = slice(token + count, token + entry.num_tokens)
                words = ancestor_words(tree.parents)
                depths = np.bitwise_count(words).sum(axis=1).astype(np.int32) - 1
                tokens[nodes] = tree.tokens
                positions[nodes] = first + depths[1:]
                ancestors[token : token + entry.num_tokens] = words
                rows.token_ids[row + 1 : row + entry.num_rows] = tree.tokens
                rows.parents[row + 1 : row + entry.num_rows] = row + 1 + tree.parents
                rows.positions[used] = first + count + depths
            row_in_use[used] = True
        rows.sequences[row : row + entry.num_rows] = number
        token += entry.num_tokens
        row += entry.num_rows
        cu_q_lens[number + 1] = token
    cu_q_lens[len(entries) + 1 :] = token
    return StepBatch(
        token_ids=tokens,
        positions=positions,
        ancestors=ancestors,
        cu_q_lens=cu_q_lens,
        kv_lens=kv_lens,
        page_table=page_table,
        num_seqs=_filled(len(entries), 1, np.int32),
        row_tokens=row_tokens,
        row_sources=row_sources,
        row_in_use=row_in_use,
        rows=rows,
        sequences=_sampling(entries, shape.sequences),
    )


def _sampling(entries: SequenceOf[StepEntry], count: int) -> SequenceSampling:
    arrays = SequenceSampling(
        slots=_filled(0, count, np.int32),
        seeds=_filled(0, (count, 2), np.uint32),
        temperature=_filled(0, count, np.float32),
        top_k=_filled(0, count, np.int32),
        top_p=_filled(1, count, np.float32),
        min_p=_filled(0, count, np.float32),
        repetition_penalty=_filled(1, count, np.float32),
        presence_penalty=_filled(0, count, np.float32),
        frequency_penalty=_filled(0, count, np.float32),
        stop_from_position=_filled(0, count, np.int32),
        uses_tables=_filled(0, count, np.bool_),
    )
    for number, entry in enumerate(entries):
        sequence, sampling = entry.sequence, entry.sequence.sampling
        arrays.slots[number] = sequence.slot
        arrays.seeds[number] = sequence.seed & _WORD, sequence.seed >> 32
        arrays.temperature[number] = sampling.temperature
        arrays.top_k[number] = sampling.top_k
        arrays.top_p[number] = sampling.top_p
        arrays.min_p[number] = sampling.min_p
        arrays.repetition_penalty[number] = sampling.repetition_penalty
        arrays.presence_penalty[number] = sampling.presence_penalty
        arrays.frequency_penalty[number] = sampling.frequency_penalty
        arrays.stop_from_position[number] = sequence.prompt_len + sampling.min_tokens
        arrays.uses_tables[number] = sampling.changes_logits and sequence.score_from is None
    return arrays


def table_rows(
    sequence: Sequence, vocab_size: int, flags_in_prompt: int, flag_stop: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float32]]:
    """A sequence's rows of the sampling tables: output_counts, flags and bias, each [V]."""
    counts = np.bincount(sequence.output, minlength=vocab_size).astype(np.int32)
    flags = np.zeros(vocab_size, np.uint8)
    flags[sequence.tokens[: sequence.prompt_len]] |= np.uint8(flags_in_prompt)
    flags[list(sequence.stop_tokens)] |= np.uint8(flag_stop)
    bias = np.zeros(vocab_size, np.float32)
    for token, value in (sequence.sampling.logit_bias or {}).items():
        bias[token] = value
    bias[list(sequence.sampling.bad_token_ids)] = -np.inf
    return counts, flags, bias
