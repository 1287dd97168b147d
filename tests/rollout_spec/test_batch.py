"""A packed step says of every token and every row what the sequence itself says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_spec.batch import StepEntry, pack, table_rows
from rollout_spec.requests import Sequence
from rollout_spec.slots import SlotTable
from rollout_spec.step_inputs import StepBatch, StepShape, batch_layout
from rollout_spec.tree import ROOT, DraftTree
from tests.helpers.drafters import random_tree
from tests.rollout_spec.sequences import CONFIG, append, new_sequence, random_tokens, scoring_sequence

PAGES = 12
SHAPE = StepShape(tokens=60, sequences=5, rows=40)


def random_entry(rng: np.random.Generator, slot: int) -> StepEntry:
    """A part of a step of any kind: a prompt's chunk or its end, one token, a tree, a piece to score."""
    kind = rng.choice(["chunk", "end of prompt", "one token", "tree", "score"])
    prompt = random_tokens(rng, int(rng.integers(2, 12)))
    if kind == "score":
        sequence = scoring_sequence(prompt, random_tokens(rng, int(rng.integers(1, 6))))
        sequence.cached = int(rng.integers(0, len(prompt)))
        entry = StepEntry(sequence, int(rng.integers(1, sequence.uncached + 1)))
    else:
        sequence = new_sequence(
            prompt, max_tokens=40, seed=int(rng.integers(2**63)), top_k=slot, min_tokens=slot
        )
        append(sequence, random_tokens(rng, int(rng.integers(1, 9))))
        decoding = kind in ("one token", "tree")
        sequence.cached = sequence.length - 1 if decoding else int(rng.integers(0, len(prompt)))
        count = int(rng.integers(1, sequence.uncached)) if kind == "chunk" else sequence.uncached
        tree = (
            random_tree(rng, int(rng.integers(1, 9)), CONFIG.vocab_size, [], "mixed")
            if kind == "tree"
            else None
        )
        entry = StepEntry(sequence, count, tree)
    sequence.slot = slot
    pages = -(-(sequence.cached + entry.num_tokens) // 4)
    sequence.pages = [int(page) for page in rng.permutation(100)[:pages]]
    return entry


def paths(entry: StepEntry) -> list[list[int]]:
    """Per token of the entry: the places in the step, within the entry, that it sees; for trees, by walking up."""
    if entry.tree is None:
        return [list(range(place + 1)) for place in range(entry.count)]
    seen = [[0]]
    for node, parent in enumerate(entry.tree.parents.tolist()):
        seen.append([*seen[parent + 1], node + 1])
    return seen


def check_tokens(batch: StepBatch, number: int, entry: StepEntry) -> None:
    sequence, start = entry.sequence, int(batch.cu_q_lens[number])
    here = slice(start, start + entry.num_tokens)
    drafted = entry.tree.tokens.tolist() if entry.tree is not None else []
    known = sequence.tokens[sequence.cached : sequence.cached + entry.count].tolist()
    assert batch.token_ids[here].tolist() == known + drafted
    seen = paths(entry)
    assert batch.positions[here].tolist() == [sequence.cached + len(path) - 1 for path in seen]
    assert batch.kv_lens[number] == sequence.cached + entry.num_tokens
    assert batch.page_table[number, : len(sequence.pages)].tolist() == sequence.pages
    for place, path in enumerate(seen):
        low, high = (int(word) for word in batch.ancestors[start + place])
        if entry.tree is None:
            assert low == high == 2**32 - 1
        else:
            assert [bit for bit in range(64) if (low | high << 32) >> bit & 1] == path


def check_rows(batch: StepBatch, number: int, entry: StepEntry) -> None:
    sequence, start = entry.sequence, int(batch.cu_q_lens[number])
    rows = batch.rows
    seen = paths(entry)
    for row in range(entry.first_row, entry.first_row + entry.num_rows):
        place = int(batch.row_tokens[row]) - start  # within the entry
        assert 0 <= place < entry.num_tokens
        assert rows.sequences[row] == number
        position = batch.positions[start + place] + 1
        assert rows.positions[row] == position
        if sequence.score_from is not None:
            assert rows.targets[row] == sequence.tokens[position]
            assert not batch.row_in_use[row]
            continue
        assert batch.row_in_use[row]
        assert batch.row_sources[row] == sequence.cached + place
        node = row - entry.first_row - 1
        assert place == entry.count + node, "the root's row first, then the nodes' in order"
        if node == ROOT:
            assert rows.parents[row] == ROOT
        else:
            assert rows.token_ids[row] == batch.token_ids[start + place]
            assert rows.parents[row] == entry.first_row + len(seen[: seen[place][-2]])


def check_sampling(batch: StepBatch, number: int, sequence: Sequence) -> None:
    arrays, sampling = batch.sequences, sequence.sampling
    assert arrays.slots[number] == sequence.slot
    low, high = (int(word) for word in arrays.seeds[number])
    assert low | high << 32 == sequence.seed
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert getattr(arrays, name)[number] == np.float32(getattr(sampling, name))
    assert arrays.stop_from_position[number] == sequence.prompt_len + sampling.min_tokens
    assert arrays.uses_tables[number] == (sampling.min_tokens > 0 and sequence.score_from is None)


@pytest.mark.parametrize("seed", range(30))
def test_every_token_and_row_of_a_random_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    entries: list[StepEntry] = []
    for slot in range(int(rng.integers(1, SHAPE.sequences + 1))):
        entry = random_entry(rng, slot)
        tokens = sum(other.num_tokens for other in [*entries, entry])
        if tokens <= SHAPE.tokens and sum(other.num_rows for other in [*entries, entry]) <= SHAPE.rows:
            entries.append(entry)
    batch = pack(entries, SHAPE, SlotTable(SHAPE.sequences, PAGES)).arrays
    assert batch.num_seqs.tolist() == [len(entries)]
    assert len(batch.token_ids) == SHAPE.tokens
    assert len(batch.row_tokens) == SHAPE.rows
    token = row = 0
    for number, entry in enumerate(entries):
        assert batch.cu_q_lens[number] == token
        assert entry.first_row == row
        check_tokens(batch, number, entry)
        check_rows(batch, number, entry)
        check_sampling(batch, number, entry.sequence)
        token, row = token + entry.num_tokens, row + entry.num_rows
    assert (batch.cu_q_lens[len(entries) :] == token).all()
    assert not batch.row_in_use[row:].any()
    assert (batch.rows.parents[row:] == ROOT).all()


def test_the_arrays_have_the_dtypes_that_steps_are_compiled_for() -> None:
    slots = SlotTable(1, PAGES)
    empty = pack([], SHAPE, slots).arrays
    full = pack([random_entry(np.random.default_rng(0), 0)], SHAPE, slots).arrays

    def signature(batch: StepBatch) -> list[Any]:
        arrays = [*vars(batch).values(), *vars(batch.rows).values(), *vars(batch.sequences).values()]
        return [(array.dtype, array.shape) for array in arrays if isinstance(array, np.ndarray)]

    assert signature(empty) == signature(full)
    assert {dtype for dtype, _ in signature(empty)} == {np.dtype(n) for n in ("i4", "u4", "f4")}


def test_the_device_reads_from_the_buffer_what_was_packed() -> None:
    packed = pack([random_entry(np.random.default_rng(3), 0)], SHAPE, SlotTable(1, PAGES))
    unpacked = batch_layout(SHAPE, PAGES).unpack(jnp.asarray(packed.buffer))
    for there, here in zip(jax.tree.leaves(unpacked), jax.tree.leaves(packed.arrays), strict=True):
        assert there.shape == here.shape
        assert there.dtype in (here.dtype, np.bool_)
        np.testing.assert_array_equal(there, here)


def test_a_slot_is_written_anew_for_the_sequence_that_takes_it_over() -> None:
    """The table remembers what it has of a slot; a later owner, or the same one after preemption, must not see it."""
    rng = np.random.default_rng(1)
    slots = SlotTable(2, PAGES)
    for _ in range(20):
        entry = random_entry(rng, int(rng.integers(2)))
        batch = pack([entry], SHAPE, slots).arrays
        check_tokens(batch, 0, entry)
        check_sampling(batch, 0, entry.sequence)
        entry.sequence.pages = [*entry.sequence.pages, 7]
        check_tokens(pack([entry], SHAPE, slots).arrays, 0, entry)


# What an entry samples and scores


def test_an_entry_samples_only_if_the_last_known_token_is_in_it() -> None:
    sequence = new_sequence([5] * 6)
    assert not StepEntry(sequence, 5).samples
    assert StepEntry(sequence, 5).num_rows == 0
    assert StepEntry(sequence, 6).samples
    assert StepEntry(sequence, 6).num_rows == 1
    sequence.cached = 5
    assert StepEntry(sequence, 1, DraftTree.path([7, 8])).num_rows == 3


def test_chunks_of_a_scored_text_score_each_position_once() -> None:
    for chunk in (1, 2, 3, 4, 11):
        sequence = scoring_sequence([5] * 4, [6] * 8)
        scored: list[int] = []
        while sequence.uncached:
            entry = StepEntry(sequence, min(chunk, sequence.uncached))
            assert entry.num_rows == len(entry.scored)
            assert not entry.samples
            scored += entry.scored
            sequence.cached += entry.count
        assert scored == list(range(4, 12))
        assert sequence.cached == 11, "the last token is no input"


def test_scoring_may_begin_with_a_cached_prompt() -> None:
    sequence = scoring_sequence([5] * 4, [6] * 2)
    sequence.cached = 3
    assert list(StepEntry(sequence, 1).scored) == [4]
    assert list(StepEntry(sequence, 2).scored) == [4, 5]


# Tables


def test_the_tables_hold_the_output_so_far_the_prompt_the_stops_and_the_biases() -> None:
    sequence = new_sequence(
        [5, 6, 5], logit_bias={9: 1.5, 10: -2.0}, bad_token_ids=[10, 11], stop_token_ids=[20], min_tokens=4
    )
    append(sequence, [7, 7, 5])
    counts, flags, bias = table_rows(sequence, CONFIG.vocab_size, 1, 2)
    assert (counts.dtype, flags.dtype, bias.dtype) == (np.int32, np.uint8, np.float32)
    assert {token: int(counts[token]) for token in np.flatnonzero(counts)} == {7: 2, 5: 1}
    assert {token: int(flags[token]) for token in np.flatnonzero(flags)} == {5: 1, 6: 1, 20: 2, 3: 2}
    assert {int(token): float(bias[token]) for token in np.flatnonzero(bias)} == {
        9: 1.5,
        10: -np.inf,
        11: -np.inf,
    }


def test_a_token_of_the_prompt_may_be_a_stop_token_too() -> None:
    sequence = new_sequence([3, 4], ignore_eos=True, stop_token_ids=[4])
    _, flags, _ = table_rows(sequence, CONFIG.vocab_size, 1, 2)
    assert {int(token): int(flags[token]) for token in np.flatnonzero(flags)} == {3: 1, 4: 3}


def test_an_empty_output_and_no_options_give_empty_tables() -> None:
    counts, flags, bias = table_rows(new_sequence([5], ignore_eos=True), CONFIG.vocab_size, 1, 2)
    assert len(counts) == len(flags) == len(bias) == CONFIG.vocab_size
    assert not counts.any()
    assert not bias.any()
    assert np.flatnonzero(flags).tolist() == [5]
