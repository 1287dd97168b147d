"""Sequences with draft trees, as inputs of the sampling kernel and as calls of the plain sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from rollout_spec.kernels.sampling import (
    SEEN_IN_PROMPT,
    STOP_TOKEN,
    SampleRows,
    SamplingTables,
    SequenceSampling,
)

from rollout_spec.tree import DraftTree
from tests.helpers.plain_sampler import Float64Array, PlainDraw, PlainSampling, draw

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class SampledSequence:
    """One sequence of a step. Its rows are the root and then the nodes of its tree."""

    sampling: PlainSampling
    seed: int
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    tree: DraftTree = field(default_factory=DraftTree)
    stop_tokens: list[int] = field(default_factory=list)
    min_tokens: int = 0
    uses_tables: bool = False

    @property
    def outputs(self) -> list[list[int]]:
        """The output before each row: of the root, then of every node, its own token included."""
        outputs = [self.output]
        for token, parent in zip(self.tree.tokens.tolist(), self.tree.parents.tolist(), strict=True):
            outputs.append([*outputs[parent + 1], token])
        return outputs

    def plain_draws(self, logits: Float64Array) -> list[PlainDraw]:
        """The token at each row, given logits float64[rows, V]."""
        return [
            draw(
                row_logits,
                self.sampling,
                seed=self.seed,
                position=len(self.prompt) + len(output),
                prompt=self.prompt,
                output=output,
                masked=self.stop_tokens if len(output) < self.min_tokens else (),
            )
            for row_logits, output in zip(logits, self.outputs, strict=True)
        ]


def kernel_inputs(
    sequences: Sequence[SampledSequence], slots: Sequence[int], vocab_size: int
) -> tuple[SampleRows, SequenceSampling, SamplingTables]:
    """Inputs of `tree_sample` for sequence i in slot slots[i]; rows of the sequences one after the other."""
    count = len(sequences)
    output_counts = np.zeros((count, vocab_size), np.int32)
    flags = np.zeros((count, vocab_size), np.uint8)
    bias = np.zeros((count, vocab_size), np.float32)
    token_ids: list[int] = []
    parents: list[int] = []
    owners: list[int] = []
    positions: list[int] = []
    for index, (sequence, slot) in enumerate(zip(sequences, slots, strict=True)):
        np.add.at(output_counts[slot], sequence.output, 1)
        flags[slot, sequence.prompt] |= SEEN_IN_PROMPT
        flags[slot, sequence.stop_tokens] |= STOP_TOKEN
        for token, value in sequence.sampling.logit_bias.items():
            bias[slot, token] = value
        bias[slot, list(sequence.sampling.bad_token_ids)] = -np.inf
        root = len(token_ids)
        token_ids += [0, *sequence.tree.tokens.tolist()]
        parents += [-1, *(root + 1 + parent for parent in sequence.tree.parents.tolist())]
        owners += [index] * (len(sequence.tree) + 1)
        positions += [len(sequence.prompt) + len(output) for output in sequence.outputs]

    samplings = [sequence.sampling for sequence in sequences]
    seeds = [(sequence.seed & 0xFFFFFFFF, sequence.seed >> 32) for sequence in sequences]
    return (
        SampleRows(
            token_ids=jnp.array(token_ids, jnp.int32),
            parents=jnp.array(parents, jnp.int32),
            sequences=jnp.array(owners, jnp.int32),
            positions=jnp.array(positions, jnp.int32),
            targets=jnp.arange(len(token_ids), dtype=jnp.int32) % vocab_size,
        ),
        SequenceSampling(
            slots=jnp.array(slots, jnp.int32),
            seeds=jnp.array(seeds, jnp.uint32),
            top_k=jnp.array([sampling.top_k for sampling in samplings], jnp.int32),
            **{
                name: jnp.array([getattr(sampling, name) for sampling in samplings], jnp.float32)
                for name in _NUMBERS
            },
            stop_from_position=jnp.array(
                [len(sequence.prompt) + sequence.min_tokens for sequence in sequences], jnp.int32
            ),
            uses_tables=jnp.array([sequence.uses_tables for sequence in sequences]),
        ),
        SamplingTables(output_counts=jnp.array(output_counts), flags=jnp.array(flags), bias=jnp.array(bias)),
    )
