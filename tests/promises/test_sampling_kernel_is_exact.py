"""The sampling kernel: the plain sampler's token at every row of a tree, and the exact distribution."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_spec.kernels.sampling import tree_sample

from tests.helpers.agreement import LEAST_MARGIN, NUMBER_TOLERANCE
from tests.helpers.chi_square import LEAST_P_VALUE, chi_square_p_value
from tests.helpers.drafters import random_tree
from tests.helpers.plain_sampler import PlainSampling, filtered_logits, log_softmax
from tests.helpers.sample_rows import SampledSequence, kernel_inputs

VOCABULARY = 600  # three blocks, the last one part full
USED = 50  # prompts, outputs and drafts are of these tokens, so that penalties meet
SEQUENCES = 6
NODES = 9  # a tree, so that every set of sequences has the same number of rows

sample = jax.jit(tree_sample)


def random_sequence(rng: np.random.Generator, *, with_tables: bool) -> SampledSequence:
    def tokens(below: int, count: int) -> list[int]:
        return [int(token) for token in rng.integers(below, size=count)]

    values: dict[str, Any] = {"temperature": float(rng.choice([0.0, 0.5, 1.0, 2.0]))}
    if rng.random() < 0.4:
        values["top_k"] = int(rng.choice([1, 3, 40, VOCABULARY, 10_000]))
    if rng.random() < 0.4:
        values["top_p"] = float(rng.choice([1e-6, 0.3, 0.8, 0.99]))
    if rng.random() < 0.4:
        values["min_p"] = float(rng.choice([1e-4, 0.1, 1.0]))
    if with_tables:
        values["repetition_penalty"] = float(rng.choice([0.7, 1.0, 1.5]))
        values["presence_penalty"] = float(rng.choice([-1.0, 0.0, 0.5]))
        values["frequency_penalty"] = float(rng.choice([-0.5, 0.0, 0.4]))
        values["logit_bias"] = {token: float(rng.normal(0, 4)) for token in tokens(VOCABULARY, 5)}
        values["bad_token_ids"] = tokens(VOCABULARY, 30)
    tree = random_tree(rng, NODES, USED, [tokens(USED, NODES)], "mixed")
    assert len(tree) == NODES
    return SampledSequence(
        PlainSampling(**values),
        seed=int(rng.integers(2**63)),
        prompt=tokens(USED, 20),
        output=tokens(USED, int(rng.integers(12))),
        tree=tree,
        stop_tokens=tokens(VOCABULARY, 20) if with_tables else [],
        min_tokens=int(rng.integers(20)) if with_tables else 0,
        uses_tables=with_tables,
    )


@pytest.mark.parametrize("seed", range(12))
def test_every_row_of_random_trees_samples_what_the_plain_sampler_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    share_with_tables = (0.0, 0.5, 1.0)[seed % 3]
    sequences = [random_sequence(rng, with_tables=rng.random() < share_with_tables) for _ in range(SEQUENCES)]
    logits = rng.normal(0, 3, (SEQUENCES, NODES + 1, VOCABULARY)).astype(np.float32)
    plain_logits = logits.astype(np.float64)
    expected = [
        drawn
        for sequence, rows in zip(sequences, plain_logits, strict=True)
        for drawn in sequence.plain_draws(rows)
    ]
    flat = jnp.array(logits.reshape(-1, VOCABULARY))
    rows, parameters, tables = kernel_inputs(sequences, rng.permutation(SEQUENCES).tolist(), VOCABULARY)
    result = sample(flat, rows, parameters, tables)

    sure = np.array([drawn.margin > LEAST_MARGIN for drawn in expected])
    assert sure.mean() > 0.9
    tokens = np.asarray(result.tokens)
    np.testing.assert_array_equal(tokens[sure], np.array([drawn.token for drawn in expected])[sure])
    for name, plain_name in (
        ("logprobs", "logprob"),
        ("sampled_logprobs", "sampled_logprob"),
        ("kept_mass", "kept_mass"),
    ):
        numbers = np.array([getattr(drawn, plain_name) for drawn in expected])
        ours = np.asarray(getattr(result, name))
        np.testing.assert_allclose(ours[sure], numbers[sure], atol=NUMBER_TOLERANCE, err_msg=name)
    targets = log_softmax(np.asarray(flat, np.float64))[np.arange(len(tokens)), np.asarray(rows.targets)]
    np.testing.assert_allclose(result.target_logprobs, targets, atol=NUMBER_TOLERANCE)


@pytest.mark.parametrize("share_of_truth", [0.3, 0.95])
def test_walk_accepts_a_node_if_its_whole_path_was_sampled(share_of_truth: float) -> None:
    rng = np.random.default_rng(8)
    depths = set()
    for _ in range(20):
        sequences = [random_sequence(rng, with_tables=False) for _ in range(SEQUENCES)]
        rows, parameters, tables = kernel_inputs(sequences, list(range(SEQUENCES)), VOCABULARY)
        parents = np.asarray(rows.parents)
        # Logits so sharp that the token is known beforehand: that of one of the row's children, or another.
        wanted = rng.integers(USED, VOCABULARY, len(parents))
        for row in range(len(parents)):
            children = np.flatnonzero(parents == row)
            if len(children) and rng.random() < share_of_truth:
                wanted[row] = rows.token_ids[int(rng.choice(children))]
        logits = jnp.zeros((len(parents), VOCABULARY)).at[jnp.arange(len(parents)), wanted].set(1000.0)
        result = sample(logits, rows, parameters, tables)
        np.testing.assert_array_equal(result.tokens, wanted)
        accepted = np.asarray(result.accepted)
        depth = np.zeros(len(parents), int)
        for row, parent in enumerate(parents):
            follows = parent < 0 or (accepted[parent] and wanted[parent] == int(rows.token_ids[row]))
            assert accepted[row] == follows
            depth[row] = depth[parent] + 1 if parent >= 0 else 0
        depths.add(int(depth[accepted].max()))
    assert max(depths) >= 2


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_p": 0.8}, {"top_k": 30}, {"min_p": 0.1}],
    ids=str,
)
def test_draws_over_many_seeds_follow_the_exact_probabilities(filters: dict[str, Any]) -> None:
    batches, batch = 30, 500
    logits = np.random.default_rng(5).normal(0, 2, VOCABULARY).astype(np.float32)
    sampling = PlainSampling(**filters)
    exact, _, _ = filtered_logits(logits.astype(np.float64), sampling)
    rows_of_logits = jnp.broadcast_to(jnp.array(logits), (batch, VOCABULARY))
    counts = np.zeros(VOCABULARY, int)
    for number in range(batches):
        seeds = range(number * batch, (number + 1) * batch)
        sequences = [SampledSequence(sampling, seed=seed, prompt=[1] * (seed % 3)) for seed in seeds]
        rows, parameters, tables = kernel_inputs(sequences, list(range(batch)), VOCABULARY)
        tokens = sample(rows_of_logits, rows, parameters, tables).tokens
        counts += np.bincount(np.asarray(tokens), minlength=VOCABULARY)
    assert chi_square_p_value(counts, np.exp(log_softmax(exact))) > LEAST_P_VALUE
