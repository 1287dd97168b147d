"""What a step takes: its sizes, its arrays, and the one buffer in which they travel to the device.

A step has some twenty small arrays. Sent one by one they would cost more than the arithmetic of a small model, so
they are views of a single int32 buffer on the host, and slices of it on the device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from .kernels.sampling import SampleRows, SequenceSampling, TreeSample

CAUSAL = 0xFFFFFFFF
"""Both ancestor words of a token that isn't part of a tree."""


@dataclass(frozen=True, order=True)
class StepShape:
    """The sizes a step is compiled for."""

    tokens: int
    """T: tokens of prompt chunks, roots and draft nodes."""
    sequences: int
    """S: sequences that take part."""
    rows: int
    """R: tokens at which something is sampled or scored."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """A step's inputs, arrays of a StepShape's sizes. P: pages of the longest sequence.

    On the host they are numpy views of a buffer, with int32 in place of bool.
    """

    token_ids: jax.Array  # int32[T]
    positions: jax.Array  # int32[T], in the text; a node's is its root's plus its depth
    ancestors: jax.Array  # uint32[T, 2], see tree_paged_attention
    cu_q_lens: jax.Array  # int32[S + 1]
    kv_lens: jax.Array  # int32[S], cached tokens, the step's included
    page_table: jax.Array  # int32[S, P]
    num_seqs: jax.Array  # int32[1]
    next_ids: jax.Array  # int32[T], the text's token behind each, -1 where it isn't known before the step
    previous: (
        jax.Array
    )  # int32[T], index in T of the token before each in its text, -1 for a sequence's first
    draft_depths: jax.Array  # int32[S], how far the heads look ahead of each sequence behind this step
    row_tokens: jax.Array  # int32[R], index in T of each row's token
    row_sources: jax.Array  # int32[R], cache position of each row's token within its sequence
    row_in_use: jax.Array  # bool[R]
    rows: SampleRows
    sequences: SequenceSampling


@dataclass(frozen=True)
class HostBatch:
    """A packed step: buffer int32[N], and the arrays, which are views of it."""

    buffer: NDArray[np.int32]
    arrays: StepBatch


@dataclass(frozen=True)
class _Field:
    shape: tuple[int, ...]
    dtype: np.dtype
    empty: float
    """What unused entries hold."""

    @property
    def host_dtype(self) -> np.dtype:
        return np.dtype(np.int32) if self.dtype == np.bool_ else self.dtype


class BatchLayout:
    """Where in the buffer each array of a StepBatch lies. All are of 4-byte words."""

    def __init__(self, shape: StepShape, pages: int) -> None:
        self._fields, self._tree = jax.tree.flatten(_fields(shape, pages))
        ends = np.cumsum([np.prod(field.shape, dtype=np.int64) for field in self._fields]).tolist()
        self._parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._host = [
            (part, field.host_dtype, field.shape)
            for part, field in zip(self._parts, self._fields, strict=True)
        ]
        self._template = np.zeros(ends[-1], np.int32)
        for part, field in zip(self._parts, self._fields, strict=True):
            self._template[part].view(field.host_dtype)[:] = field.empty

    def new(self) -> HostBatch:
        """An empty step."""
        buffer = self._template.copy()
        views = [buffer[part].view(dtype).reshape(shape) for part, dtype, shape in self._host]
        return HostBatch(buffer, jax.tree.unflatten(self._tree, views))

    def unpack(self, buffer: jax.Array) -> StepBatch:
        """The arrays, on the device."""

        def array(part: slice, field: _Field) -> jax.Array:
            words = buffer[part].reshape(field.shape)
            if field.dtype == np.bool_:
                return words != 0
            return jax.lax.bitcast_convert_type(words, field.dtype)

        return jax.tree.unflatten(self._tree, list(map(array, self._parts, self._fields)))


@functools.lru_cache(maxsize=1024)
def batch_layout(shape: StepShape, pages: int) -> BatchLayout:
    """The layout for steps of `shape` with `pages` pages a sequence."""
    return BatchLayout(shape, pages)


def _fields(shape: StepShape, pages: int) -> Any:
    """A StepBatch of _Field."""

    def field(dtype: Any, *sizes: int, empty: float = 0) -> Any:
        return _Field(sizes, np.dtype(dtype), empty)

    tokens, sequences, rows = shape.tokens, shape.sequences, shape.rows
    return StepBatch(
        token_ids=field(np.int32, tokens),
        positions=field(np.int32, tokens),
        ancestors=field(np.uint32, tokens, 2, empty=CAUSAL),
        cu_q_lens=field(np.int32, sequences + 1),
        kv_lens=field(np.int32, sequences),
        page_table=field(np.int32, sequences, pages),
        num_seqs=field(np.int32, 1),
        next_ids=field(np.int32, tokens, empty=-1),
        previous=field(np.int32, tokens, empty=-1),
        draft_depths=field(np.int32, sequences),
        row_tokens=field(np.int32, rows),
        row_sources=field(np.int32, rows),
        row_in_use=field(np.bool_, rows),
        rows=SampleRows(
            token_ids=field(np.int32, rows),
            parents=field(np.int32, rows, empty=-1),
            sequences=field(np.int32, rows),
            positions=field(np.int32, rows),
            targets=field(np.int32, rows),
        ),
        sequences=SequenceSampling(
            slots=field(np.int32, sequences),
            seeds=field(np.uint32, sequences, 2),
            temperature=field(np.float32, sequences),
            top_k=field(np.int32, sequences),
            top_p=field(np.float32, sequences, empty=1),
            min_p=field(np.float32, sequences),
            repetition_penalty=field(np.float32, sequences, empty=1),
            presence_penalty=field(np.float32, sequences),
            frequency_penalty=field(np.float32, sequences),
            stop_from_position=field(np.int32, sequences),
            uses_tables=field(np.bool_, sequences),
        ),
    )


def pack_results(sample: Any, drafts: Any) -> jax.Array:
    """int32[N]: a TreeSample, and the heads' Drafts if they draft, as one array, so that one fetch brings it all."""
    floats = (sample.logprobs, sample.sampled_logprobs, sample.kept_mass, sample.target_logprobs)
    words = [jax.lax.bitcast_convert_type(numbers, jnp.int32) for numbers in floats]
    parts = [sample.tokens, sample.accepted.astype(jnp.int32), *words]
    if drafts is not None:
        parts += [drafts.tokens.ravel(), jax.lax.bitcast_convert_type(drafts.probs, jnp.int32).ravel()]
    return jnp.concatenate(parts)


def unpack_results(packed: NDArray[np.int32], rows: int) -> tuple[TreeSample, NDArray[np.int32]]:
    """The TreeSample, of numpy arrays, and the words of the Drafts."""
    numbers = packed[: 6 * rows].reshape(6, rows)
    sample = TreeSample(
        numbers[0],
        *[row.view(np.float32) for row in numbers[2:]],
        numbers[1] != 0,
    )
    return sample, packed[6 * rows :]
