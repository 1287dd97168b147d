"""The shape and options of a decoder-only transformer.

`ModelConfig` says everything needed to build the network and to lay out its weights; it is hashable, so that
compiled functions and built graphs are cached by it. Checkpoint formats are read into it by
`rollout_spec.loading`; which options a family allows is said in the family's file.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "factors"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base and how it is stretched to longer contexts.

    Formulas are in `rollout_spec.models.rope`. Fields that a kind does not use keep their defaults.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    """How many times longer than `original_max_position_embeddings` (linear, dynamic, llama3, yarn)."""
    original_max_position_embeddings: int | None = None
    """Positions the model was trained on before stretching, in tokens (dynamic, llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / low_freq_factor are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / high_freq_factor are kept."""
    attention_factor: float = 1.0
    """yarn: multiplies cos and sin, so scores grow by its square; already resolved from mscale and factor."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this over the original context are kept."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this over the original context are divided by `factor`."""
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions."""
    frequency_factors: tuple[float, ...] = ()
    """factors: divisor of each of the head_dim / 2 frequencies (how GGUF files store llama3 scaling)."""

    @property
    def max_length(self) -> int | None:
        """Longest sequence, in tokens, for which the fixed frequencies hold; None if there is no such limit.

        Dynamic NTK scaling changes the frequencies of all positions once a sequence outgrows the original
        context, which would invalidate keys already cached, so sequences must stay within it.
        """
        return self.original_max_position_embeddings if self.kind == "dynamic" else None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder-only transformer. All counts are in elements or tokens."""

    architecture: str
    """Name of the family, a key of `rollout_spec.models.registry`: "llama", "qwen2"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    attention_out_bias: bool = False
    """A bias on the attention's output projection."""
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def attention_scale(self) -> float:
        """Multiplier of q . k before the softmax."""
        return float(self.head_dim) ** -0.5

    @property
    def max_length(self) -> int:
        """Longest sequence the model takes, in tokens."""
        limit = self.rope.max_length
        return self.max_position_embeddings if limit is None else min(limit, self.max_position_embeddings)
