"""Packs what the scheduler planned into a step's arrays."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .requests import Sequence
from .slots import SlotTable
from .step_inputs import HostBatch, StepShape, batch_layout
from .tree import DraftTree


@dataclass(eq=False)
class StepEntry:
    """One sequence's part of a step: the next `count` of its uncached tokens, and a tree below the last."""

    sequence: Sequence
    count: int
    tree: DraftTree | None = None
    draft_depth: int = 0
    """How far the policy's heads look ahead of it behind this step."""
    first_row: int = 0
    """Its first row in the step, set by `pack`."""

    @property
    def num_nodes(self) -> int:
        return 0 if self.tree is None else len(self.tree)

    @property
    def num_tokens(self) -> int:
        return self.count + self.num_nodes

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


def pack(
    entries: SequenceOf[StepEntry], shape: StepShape, slots: SlotTable, *, for_heads: bool = False
) -> HostBatch:
    """The arrays of a step of `shape`; the entries must fit it. for_heads: also what only drafting heads read."""
    packed = batch_layout(shape, slots.pages_per_sequence).new()
    batch: Any = packed.arrays  # numpy arrays where the types say jax arrays: the jitted step takes either
    token = row = 0
    for number, entry in enumerate(entries):
        sequence = entry.sequence
        first, count, total = sequence.cached, entry.count, entry.num_tokens
        slots.update(sequence)
        if count == 1:
            batch.token_ids[token] = sequence.tokens[first]
            batch.positions[token] = first
        else:
            batch.token_ids[token : token + count] = sequence.tokens[first : first + count]
            batch.positions[token : token + count] = np.arange(first, first + count)
        batch.kv_lens[number] = first + total
        if for_heads:
            _pack_for_heads(batch, entry, number, token)
        entry.first_row = row
        if sequence.score_from is not None:
            _pack_scored(batch, entry, number, token)
        elif entry.samples:
            batch.row_tokens[row] = token + count - 1
            batch.row_sources[row] = first + count - 1
            batch.row_in_use[row] = 1
            batch.rows.sequences[row] = number
            batch.rows.token_ids[row] = batch.token_ids[token + count - 1]
            batch.rows.positions[row] = first + count
            if total > count:
                _pack_tree(batch, entry, number, token)
        token += total
        row += entry.num_rows
        batch.cu_q_lens[number + 1] = token
    batch.cu_q_lens[len(entries) + 1 :] = token
    batch.num_seqs[0] = len(entries)
    used = np.array([entry.sequence.slot for entry in entries], np.int64)
    batch.page_table[: len(entries)] = slots.page_table[used]
    slots.fill(used, batch.sequences)
    return packed


def _pack_for_heads(batch: Any, entry: StepEntry, number: int, token: int) -> None:
    sequence, first, count = entry.sequence, entry.sequence.cached, entry.count
    behind = sequence.tokens[first + 1 : min(first + count + 1, sequence.length)]
    batch.next_ids[token : token + len(behind)] = behind
    batch.previous[token + 1 : token + count] = np.arange(token, token + count - 1)
    batch.draft_depths[number] = entry.draft_depth
    if entry.tree is not None:
        root = token + count - 1
        batch.previous[root + 1 : root + 1 + len(entry.tree)] = root + 1 + entry.tree.parents


def _pack_scored(batch: Any, entry: StepEntry, number: int, token: int) -> None:
    """The rows of a sequence that scores; its tokens begin at `token` of the step."""
    sequence, scored = entry.sequence, np.array(entry.scored, np.int32)
    rows = slice(entry.first_row, entry.first_row + len(scored))
    batch.row_tokens[rows] = token + scored - 1 - sequence.cached
    batch.rows.sequences[rows] = number
    batch.rows.targets[rows] = sequence.tokens[scored]
    batch.rows.positions[rows] = scored


def _pack_tree(batch: Any, entry: StepEntry, number: int, token: int) -> None:
    """The tree below the root, which is token `token` + count - 1 of the step and whose row is filled in."""
    assert entry.tree is not None
    tree, cached = entry.tree, entry.sequence.cached
    root, root_row = token + entry.count - 1, entry.first_row
    nodes = slice(root + 1, root + 1 + len(tree))
    rows = slice(root_row + 1, root_row + 1 + len(tree))
    words = tree.ancestors()
    depths = np.bitwise_count(words[1:]).sum(axis=1, dtype=np.int32) - 1
    batch.token_ids[nodes] = batch.rows.token_ids[rows] = tree.tokens
    batch.positions[nodes] = cached + entry.count - 1 + depths
    batch.ancestors[root : nodes.stop] = words
    batch.row_tokens[rows] = np.arange(nodes.start, nodes.stop)
    batch.row_sources[rows] = cached + entry.count + np.arange(len(tree))
    batch.row_in_use[rows] = 1
    batch.rows.sequences[rows] = number
    batch.rows.parents[rows] = root_row + 1 + tree.parents
    batch.rows.positions[rows] = cached + entry.count + depths


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
