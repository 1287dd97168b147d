"""The sampling kernel by hand-made examples. tests/promises holds it to the plain sampler on random ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from rollout_spec.kernels.sampling import (
    SEEN_IN_PROMPT,
    STOP_TOKEN,
    SampleRows,
    SamplingTables,
    SequenceSampling,
    TreeSample,
    count_outputs,
    tree_sample,
)
from rollout_spec.kernels.sampling.reference import drafted_ancestors

from tests.helpers.plain_sampler import log_softmax

ROWS = 60

sample = jax.jit(tree_sample, static_argnames=("block_size", "backend"))
ancestors = jax.jit(drafted_ancestors)


def rows_of(count: int, **fields: Any) -> SampleRows:
    """`count` roots, row i of sequence i, at position 10."""
    values: dict[str, Any] = {
        "token_ids": np.zeros(count, np.int32),
        "parents": np.full(count, -1, np.int32),
        "sequences": np.arange(count, dtype=np.int32),
        "positions": np.full(count, 10, np.int32),
        "targets": np.zeros(count, np.int32),
    }
    return SampleRows(
        **{name: np.asarray(fields.get(name, value), np.int32) for name, value in values.items()}
    )


def sampling_of(count: int, **fields: Any) -> SequenceSampling:
    """`count` sequences, each with its own seed and slot and otherwise the defaults."""
    values: dict[str, Any] = {
        "slots": np.arange(count, dtype=np.int32),
        "seeds": np.stack([np.arange(count), np.arange(count) + 7], axis=1).astype(np.uint32),
        "temperature": np.ones(count, np.float32),
        "top_k": np.zeros(count, np.int32),
        "top_p": np.ones(count, np.float32),
        "min_p": np.zeros(count, np.float32),
        "repetition_penalty": np.ones(count, np.float32),
        "presence_penalty": np.zeros(count, np.float32),
        "frequency_penalty": np.zeros(count, np.float32),
        "stop_from_position": np.zeros(count, np.int32),
        "uses_tables": np.zeros(count, np.bool_),
    }
    return SequenceSampling(
        **{
            name: np.broadcast_to(np.asarray(fields.get(name, value), value.dtype), value.shape)
            for name, value in values.items()
        }
    )


def tables_of(slots: int, vocab_size: int) -> SamplingTables:
    return SamplingTables(
        output_counts=np.zeros((slots, vocab_size), np.int32),
        flags=np.zeros((slots, vocab_size), np.uint8),
        bias=np.zeros((slots, vocab_size), np.float32),
    )


def random_logits(count: int, vocab_size: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, (count, vocab_size)).astype(np.float32)


def draw(logits: NDArray, **fields: Any) -> TreeSample:
    """One root a row, each with a sequence of its own. Padded to ROWS rows, as compiling is what takes time."""
    count, vocab_size = logits.shape
    padded = np.zeros((ROWS, vocab_size), np.float32)
    padded[:count] = logits
    sequences = sampling_of(ROWS, **{name: np.resize(value, ROWS) for name, value in fields.items()})
    found = sample(padded, rows_of(ROWS), sequences, tables_of(ROWS, vocab_size))
    return jax.tree.map(lambda field: np.asarray(field)[:count], found)


# Forests


def random_forest(rng: np.random.Generator, count: int) -> NDArray[np.int32]:
    """Parents of rows in any mixture of roots, paths and bushes."""
    share_of_roots, reach = rng.choice([0.02, 0.3, 1.0]), int(rng.choice([1, 4, 100]))
    return np.array(
        [
            -1 if row == 0 or rng.random() < share_of_roots else rng.integers(max(0, row - reach), row)
            for row in range(count)
        ],
        np.int32,
    )


@pytest.mark.parametrize("count", [1, 2, 64, 100])
def test_drafted_ancestors_are_those_of_walking_up(count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(8):
        parents = random_forest(rng, count)
        depth = np.zeros(count, int)
        expected = np.zeros((count, count), np.bool_)
        for row, parent in enumerate(parents):
            depth[row] = depth[parent] + 1 if parent >= 0 else 0
            if depth[row] > 63:  # no tree is deeper
                parents[row], depth[row] = -1, 0
                continue
            if parent >= 0:
                expected[row] = expected[parent]
                expected[row, row] = True
        np.testing.assert_array_equal(ancestors(parents), expected)


def test_the_deepest_path_is_walked_to_its_end() -> None:
    """63 nodes below the root: accepted up to the first that was not sampled."""
    vocab_size, nodes = 70, 63
    for wrong in (None, 1, 40, nodes):
        token_ids = np.arange(nodes + 1)
        logits = np.zeros((nodes + 1, vocab_size), np.float32)
        logits[np.arange(nodes + 1), np.arange(nodes + 1) + 1] = 50.0
        if wrong is not None:
            token_ids[wrong] = 69
        rows = rows_of(
            nodes + 1,
            token_ids=token_ids,
            parents=np.arange(-1, nodes),
            sequences=np.zeros(nodes + 1),
            positions=np.arange(nodes + 1),
        )
        found = sample(logits, rows, sampling_of(1, temperature=0.0), tables_of(1, vocab_size))
        last = nodes + 1 if wrong is None else wrong
        assert np.asarray(found.accepted).tolist() == [row < last for row in range(nodes + 1)]


# Greedy, and the edges of the vocabulary


@pytest.mark.parametrize("places", [[599, 256, 255], [511, 512], [1, 0], [300, 599]])
def test_greedy_takes_the_first_of_equal_logits_over_blocks_too(places: list[int]) -> None:
    logits = random_logits(1, 600)
    logits[0, places] = 40.0
    found = draw(logits, temperature=0.0)
    assert int(found.tokens[0]) == min(places)
    assert float(found.sampled_logprobs[0]) == 0.0
    assert float(found.kept_mass[0]) == 1.0


def test_greedy_takes_the_largest_logit_not_the_heaviest_block() -> None:
    logits = np.full((1, 600), -9.0, np.float32)
    logits[0, :256] = 5.0
    logits[0, 300] = 5.1
    assert int(draw(logits, temperature=0.0).tokens[0]) == 300


def test_greedy_ignores_filters_and_the_seed() -> None:
    logits = random_logits(6, 600)
    found = draw(logits, temperature=0.0, top_k=[0, 1, 2, 3, 4, 5], top_p=0.2, min_p=0.9)
    np.testing.assert_array_equal(found.tokens, logits.argmax(axis=1))
    np.testing.assert_array_equal(found.kept_mass, np.ones(6))
    np.testing.assert_allclose(found.logprobs, log_softmax(logits.astype(float)).max(axis=1), atol=1e-5)


@pytest.mark.parametrize("vocab_size", [1, 255, 257])
def test_tokens_beyond_the_vocabulary_are_never_sampled(vocab_size: int) -> None:
    rows = ROWS
    for level in (0.0, -1000.0):
        logits = np.full((rows, vocab_size), level, np.float32)
        found = draw(logits)
        tokens = np.asarray(found.tokens)
        assert tokens.min() >= 0
        assert tokens.max() < vocab_size
        assert len(set(tokens.tolist())) > 0.5 * min(vocab_size, rows), "all of them are as likely"
        np.testing.assert_allclose(found.logprobs, -np.log(vocab_size), atol=1e-3)


def test_impossible_tokens_are_never_sampled_not_even_whole_blocks_of_them() -> None:
    logits = np.full((60, 600), -np.inf, np.float32)
    logits[:, 520] = -3.0
    logits[20:40, [5, 6]] = -4.0
    found = draw(logits, temperature=np.repeat([1.0, 2.0, 0.0], 20))
    tokens = found.tokens
    assert set(tokens[:20].tolist()) == {520}
    assert set(tokens[20:40].tolist()) == {520, 5, 6}
    assert set(tokens[40:].tolist()) == {520}
    assert np.isfinite(found.logprobs).all()
    assert np.isfinite(found.sampled_logprobs).all()


def test_temperatures_near_zero_and_very_high_stay_finite() -> None:
    logits = random_logits(4, 600)
    found = draw(logits, temperature=[1e-30, 1e-6, 1e6, 3e38])
    np.testing.assert_array_equal(found.tokens[:2], logits.argmax(axis=1)[:2])
    np.testing.assert_allclose(found.sampled_logprobs, [0, 0, -np.log(600), -np.log(600)], atol=1e-4)


# Log-probabilities


def test_without_filters_at_temperature_one_all_log_probabilities_are_the_models() -> None:
    logits = random_logits(ROWS, 600)
    found = draw(logits)
    exact = log_softmax(logits.astype(np.float64))[np.arange(ROWS), found.tokens]
    np.testing.assert_allclose(found.logprobs, exact, atol=1e-5)
    np.testing.assert_allclose(found.sampled_logprobs, exact, atol=1e-5)
    np.testing.assert_array_equal(found.kept_mass, np.ones(ROWS))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
def test_kept_mass_turns_sampled_log_probabilities_into_those_of_the_whole_vocabulary(
    temperature: float,
) -> None:
    logits = random_logits(60, 600)
    found = draw(logits, temperature=temperature, top_k=np.arange(60) % 4 * 10, top_p=0.9, min_p=0.01)
    whole = log_softmax(logits.astype(np.float64) / temperature)[np.arange(60), np.asarray(found.tokens)]
    kept_mass = np.asarray(found.kept_mass, np.float64)
    np.testing.assert_allclose(found.sampled_logprobs + np.log(kept_mass), whole, atol=1e-5)
    assert (kept_mass < 1).all()
    assert (kept_mass > 0).all()


def test_targets_are_scored_under_the_models_own_distribution() -> None:
    logits = random_logits(ROWS, 600)
    targets = np.resize([0, 599, 256, 255, 7], ROWS)
    sequences = sampling_of(ROWS, temperature=np.resize([0, 1, 3], ROWS), top_k=2)
    found = sample(logits, rows_of(ROWS, targets=targets), sequences, tables_of(ROWS, 600))
    exact = log_softmax(logits.astype(np.float64))[np.arange(ROWS), targets]
    np.testing.assert_allclose(found.target_logprobs, exact, atol=1e-5)


@pytest.mark.parametrize("other", [{"top_k": 3}, {"top_p": 0.5}, {"uses_tables": True}, {"temperature": 0.0}])
def test_a_row_does_not_see_what_other_rows_ask_for(other: dict[str, Any]) -> None:
    logits = random_logits(8, 600)
    defaults = {"top_k": 0, "top_p": 1.0, "uses_tables": False, "temperature": 1.0}
    mixed = {name: [defaults[name]] * 4 + [value] * 4 for name, value in other.items()}
    alone, among = draw(logits), draw(logits, **mixed)
    np.testing.assert_array_equal(alone.tokens[:4], among.tokens[:4])
    for name in ("logprobs", "sampled_logprobs"):
        np.testing.assert_allclose(getattr(alone, name)[:4], getattr(among, name)[:4], atol=1e-6)
    np.testing.assert_array_equal(among.kept_mass[:4], np.ones(4))


# Tables


def test_penalties_count_the_prompt_the_output_and_the_rows_own_path() -> None:
    """A root with two paths below it; each row's own path, and no other, is penalised."""
    vocab_size = 6
    logits = np.tile(np.array([2.0, -1.0, 1.0, -2.0, 0.5, 3.0], np.float32), (4, 1))
    rows = rows_of(
        4,
        token_ids=[5, 2, 2, 3],  # the root's token is in the output already
        parents=[-1, 0, 1, 0],
        sequences=np.zeros(4),
        positions=[10, 11, 12, 11],
    )
    tables = tables_of(2, vocab_size)
    tables.flags[1, [0, 1]] = SEEN_IN_PROMPT
    tables.output_counts[1, [1, 5]] = [1, 3]
    tables.output_counts[0] = 50  # another slot's
    sequences = sampling_of(
        1,
        slots=[1],
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        uses_tables=True,
    )
    # In prompt or output: 0, 1, 5; l > 0 is halved, l < 0 doubled. Counts: token 1 once, token 5 three times.
    root = [1.0, -2.0 - 0.75, 1.0, -2.0, 0.5, 1.5 - 1.25]
    with_2 = [*root[:2], 0.5 - 0.75, *root[3:]]
    with_2_twice = [*root[:2], 0.5 - 1.0, *root[3:]]
    with_3 = [*root[:3], -4.0 - 0.75, *root[4:]]
    seen_tokens: list[set[int]] = [set(), set(), set(), set()]
    for seed in range(60):
        seeded = dataclasses.replace(sequences, seeds=np.array([[seed, 0]], np.uint32))
        found = sample(logits, rows, seeded, tables)
        for row, processed in enumerate((root, with_2, with_2_twice, with_3)):
            token = int(found.tokens[row])
            seen_tokens[row].add(token)
            expected = log_softmax(np.array(processed))[token]
            assert float(found.sampled_logprobs[row]) == pytest.approx(expected, abs=1e-5)
            raw = log_softmax(logits[row].astype(np.float64))[token]
            assert float(found.logprobs[row]) == pytest.approx(raw, abs=1e-5)
    assert min(len(tokens) for tokens in seen_tokens) >= 4


def test_bias_bans_and_stop_tokens_before_their_time() -> None:
    vocab_size = 5
    logits = np.zeros((3, vocab_size), np.float32)
    tables = tables_of(3, vocab_size)
    tables.bias[:, 0] = 100.0
    tables.bias[1, 0] = -np.inf
    tables.bias[1, 1] = 60.0
    tables.flags[:, 0] = STOP_TOKEN | SEEN_IN_PROMPT
    tables.bias[:, 4] = 50.0
    for position, tokens in ((10, [4, 1, 4]), (11, [0, 1, 4]), (12, [0, 1, 0])):
        found = sample(
            logits,
            rows_of(3, positions=[position] * 3),
            sampling_of(3, stop_from_position=[11, 0, 12], uses_tables=True),
            tables,
        )
        assert np.asarray(found.tokens).tolist() == tokens


def test_tables_of_sequences_that_do_not_use_them_are_not_read() -> None:
    """Slots are reused, and their rows are written only when needed."""
    logits = random_logits(2, 6)
    stale = tables_of(2, 6)
    stale.bias[:] = -np.inf
    stale.bias[:, 3] = 0.0
    stale.flags[:] = STOP_TOKEN
    found = sample(logits, rows_of(2), sampling_of(2, uses_tables=[False, True], stop_from_position=0), stale)
    clean = draw(logits)
    assert int(found.tokens[0]) == int(clean.tokens[0])
    assert float(found.logprobs[0]) == pytest.approx(float(clean.logprobs[0]), abs=1e-6)
    assert int(found.tokens[1]) == 3


def test_emitted_tokens_are_counted_in_their_slots() -> None:
    tables = tables_of(3, 5)
    tables.output_counts[2, 4] = 6
    counted = count_outputs(
        jax.tree.map(jnp.asarray, tables),
        jnp.array([2, 2, 2, 0, 1]),
        jnp.array([4, 4, 1, 3, 3]),
        jnp.array([True, True, True, True, False]),
    )
    assert np.asarray(counted.output_counts).tolist() == [[0, 0, 0, 1, 0], [0] * 5, [0, 1, 0, 0, 8]]


# Options


def test_the_block_size_is_part_of_the_specification() -> None:
    """Other blocks draw other tokens, from the same distribution."""
    logits = random_logits(ROWS, 600)
    rows, sequences, tables = rows_of(ROWS), sampling_of(ROWS), tables_of(ROWS, 600)
    usual = sample(logits, rows, sequences, tables)
    np.testing.assert_array_equal(
        usual.tokens, sample(logits, rows, sequences, tables, block_size=256, backend="reference").tokens
    )
    assert (np.asarray(usual.tokens) != sample(logits, rows, sequences, tables, block_size=64).tokens).any()


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="got 'mosaic'"):
        sample(random_logits(1, 8), rows_of(1), sampling_of(1), tables_of(1, 8), backend="mosaic")
