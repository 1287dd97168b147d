"""The few sizes that steps are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from .config import EngineConfig
from .step_inputs import StepShape

_MOST_TREE_TOKENS = 256  # of a step that verifies drafts for several requests
_TREE_TOKENS_MULTIPLE = 8  # matmuls of odd row counts cost as much as of the next multiple
_PREFILL_ROWS = 32  # a prompt needs one; the rest is for what decodes beside it, and for scoring
_SHORT_PREFILL_TOKENS = 64


def step_shapes(config: EngineConfig) -> tuple[StepShape, ...]:
    """All shapes of an engine, smallest first.

    For 1, 4, 16, ... sequences: a token each, less for when some have ended, then trees of growing size. Rows are
    as many as tokens there, as every token of such a step is sampled. On top, larger steps for prompt chunks.
    """
    nodes = config.draft.max_nodes if config.draft.kind != "none" else 0
    shapes = set()
    fewer = 0  # sequences that smaller steps are for
    for sequences in sequence_counts(config.max_seqs):
        most = sequences * (nodes + 1)
        if nodes:
            most += -most % _TREE_TOKENS_MULTIPLE
        if sequences > 1:
            most = min(most, max(_MOST_TREE_TOKENS, sequences))
        most = min(most, config.max_batch_tokens)
        shapes |= {StepShape(tokens, sequences, tokens) for tokens in _ladder(sequences, fewer, most)}
        fewer = sequences
    largest = config.max_batch_tokens
    rows = min(largest, max(_PREFILL_ROWS, config.max_seqs))
    tokens = _SHORT_PREFILL_TOKENS
    while 3 * tokens <= 2 * largest:  # short prompts need not pay for the largest step
        shapes.add(StepShape(tokens, config.max_seqs, min(tokens, rows)))
        tokens *= 4
    for quarters in (1, 2, 3, 4):  # nor does a prompt alone need room for other sequences
        tokens = largest * quarters // 4
        if tokens >= _SHORT_PREFILL_TOKENS:
            shapes.add(StepShape(tokens, 1, min(tokens, _PREFILL_ROWS)))
    shapes.add(StepShape(largest, config.max_seqs, rows))
    return tuple(sorted(shapes))


def _ladder(sequences: int, fewer: int, most: int) -> list[int]:
    """Tokens of the steps for more than `fewer` and up to `sequences` sequences; the last is `most`.

    Fine where a draft node costs about as much as it may be worth, coarse above four tokens a sequence.
    """
    ladder = {sequences, most}
    size = max(1, 2 * fewer)
    while size < most:
        between = size + size // 2
        ladder.add(size)
        if size >= 8 and between <= max(4 * sequences, 12):
            ladder.add(between)
        size *= 2
    return sorted(tokens for tokens in ladder if fewer < tokens <= most)


def sequence_counts(max_seqs: int) -> list[int]:
    """1, 4, 16, ... and max_seqs; none that is more than half of max_seqs but that itself."""
    counts = [1]
    while counts[-1] * 8 <= max_seqs:
        counts.append(counts[-1] * 4)
    return counts if max_seqs == 1 else [*counts, max_seqs]


def smallest_fitting(shapes: Sequence[StepShape], tokens: int, sequences: int, rows: int) -> StepShape | None:
    """The first of `shapes` (sorted) that takes this many tokens, sequences and rows."""
    for shape in shapes:
        if shape.tokens >= tokens and shape.sequences >= sequences and shape.rows >= rows:
            return shape
    return None
