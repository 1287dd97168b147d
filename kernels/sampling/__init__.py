"""Sampling with counter-based noise at every node of a draft tree."""

from __future__ import annotations

import jax
from rollout_spec.kernels.backend import resolve_backend

from .inputs import (
    SEEN_IN_PROMPT,
    STOP_TOKEN,
    SampleRows,
    SamplingTables,
    SequenceSampling,
    TreeSample,
)
from .limits import check_limits, most_tokens
from .on_tpu import tree_sample_pallas
from .reference import BLOCK_SIZE, count_outputs, tree_sample_reference

__all__ = [
    "BLOCK_SIZE",
    "SEEN_IN_PROMPT",
    "STOP_TOKEN",
    "SampleRows",
    "SamplingTables",
    "SequenceSampling",
    "TreeSample",
    "count_outputs",
    "tree_sample",
]


def tree_sample(
    logits: jax.Array,
    rows: SampleRows,
    sequences: SequenceSampling,
    tables: SamplingTables,
    *,
    block_size: int = BLOCK_SIZE,
    backend: str = "auto",
    mesh: jax.sharding.Mesh | None = None,
) -> TreeSample:
    """Samples at every row, with both log-probabilities, and walks the draft trees to what is accepted.

    The order is: penalties, bias and bans, temperature, top-k, top-p, min-p. The token of a row is a pure
    function of its processed logits, its seed and its position (docs/sampling.md has the exact specification).

    Args:
        logits: float32[R, V], the model's own logits.
        rows: what each of the R rows is.
        sequences: the sampling parameters of the S sequences that rows refer to.
        tables: counts, flags and biases by slot, read only for sequences with `uses_tables`.
        block_size: tokens in a block of the two-level sampler; another size gives other tokens.
        backend: "auto" (Pallas for a TPU, where the vocabulary fits its vector memory), "pallas" or "reference".
        mesh: of devices that all hold the logits. With Pallas each samples its share of the rows, where rows can be
            shared out in eights, and else all of them.

    Raises:
        KernelLimitError: before anything is compiled, where the kernel doesn't support a size.
    """
    chosen = resolve_backend(backend)
    if chosen == "pallas" and (backend == "pallas" or logits.shape[1] <= most_tokens()):
        check_limits(logits.shape[1], block_size)
        return tree_sample_pallas(logits, rows, sequences, tables, mesh)
    return tree_sample_reference(logits, rows, sequences, tables, block_size=block_size)
