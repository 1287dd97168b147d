"""The shape and options of a decoder-only transformer.

`ModelConfig` says everything needed to build the network and to lay out its weights; it is hashable, so that
compiled functions and built graphs are cached by it. Checkpoint formats are read into it by
`rollout_spec.loading`; which options a family allows is said in the family's file.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "factors"]
Activation = Literal["silu", "gelu_tanh"]


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


MTPForm = Literal["deepseek", "mimo", "qwen3_next"]


@dataclasses.dataclass(frozen=True)
class MTPConfig:
    """Multi-token-prediction heads: whose form they have, and how many there are.

    What the forms differ in is in `rollout_spec.models.mtp`.
    """

    form: MTPForm = "deepseek"
    num_heads: int = 1


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts, and how tokens are routed to them."""

    num_experts: int
    num_chosen: int
    """Experts that a token goes through."""
    intermediate_size: int
    """Of each expert."""
    layers: tuple[int, ...]
    """Layers that have experts; the others have an MLP of the model's intermediate_size."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = False
    """The weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Multiplies the weights."""
    correction_bias: bool = False
    """A learnt number an expert, added to its score where experts are chosen, and not where they are weighed."""
    num_groups: int = 1
    chosen_groups: int = 1
    """Experts are chosen from so many of `num_groups` groups of neighbours."""
    group_score_of: int = 1
    """A group scores what so many of its best experts score together."""
    shared_intermediate_size: int = 0
    """Of the experts that every token goes through, taken together."""


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention: sizes of what keys and values are compressed to. In elements."""

    query_rank: int | None
    """None: queries aren't compressed."""
    kv_rank: int
    nope_dim: int
    """Dimensions of a head's queries and keys that aren't rotated."""
    rope_dim: int
    """Those that are; the key's are shared by all heads."""
    value_dim: int
    interleaved: bool = True
    """The two numbers of a rotary pair stand side by side."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder-only transformer. All counts are in elements or tokens."""

    architecture: str
    """Name of the family, a key of `rollout_spec.models.FAMILIES`."""
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
    activation: Activation = "silu"
    """Of the gate in the MLP."""
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before they are rotated."""
    windows: tuple[int | None, ...] = ()
    """By layer: how many positions a token sees, itself included; None is all. Empty: all on every layer."""
    windowed_rope: RopeConfig | None = None
    """Rotary embedding of the layers with a window, where it differs from the others'."""
    query_scale: float | None = None
    """q . k is multiplied by query_scale ** -0.5; None means head_dim."""
    attention_soft_cap: float | None = None
    """Attention scores become cap * tanh(score / cap)."""
    logit_soft_cap: float | None = None
    """Logits become cap * tanh(logit / cap)."""
    norm_offset: bool = False
    """Norms multiply by 1 + scale, in float32."""
    output_norms: bool = False
    """A norm behind attention and MLP too, before each is added to the residual stream."""
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    """Attention over latents, of one key head; `num_kv_heads` is 1 and `head_dim` that of expanded queries."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden_size), rounded to the weights' dtype."""
    mtp: MTPConfig | None = None
    """Heads that predict tokens further ahead; None if the model has none."""

    @property
    def attention_scale(self) -> float:
        """Multiplier of q . k before the softmax."""
        return float(self.head_dim if self.query_scale is None else self.query_scale) ** -0.5

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def window(self, layer: int) -> int | None:
        """How many positions a token of that layer sees, itself included; None is all.

        Numbers behind the last layer are the multi-token-prediction heads', which are like the last layer.
        """
        return self.windows[min(layer, self.num_layers - 1)] if self.windows else None

    @property
    def widest_window(self) -> int | None:
        """The most positions that a token of any layer sees; None if it sees all on some layer."""
        widths = [width for width in self.windows if width is not None]
        return max(widths) if widths and len(widths) == len(self.windows) else None

    def rope_of(self, layer: int) -> RopeConfig:
        """Rotary embedding of that layer, or of a head, as `window` numbers them."""
        if self.windowed_rope is None or self.window(layer) is None:
            return self.rope
        return self.windowed_rope

    @property
    def num_caches(self) -> int:
        """Layers and heads, each of which caches keys and values."""
        return self.num_layers + (0 if self.mtp is None else self.mtp.num_heads)

    @property
    def max_length(self) -> int:
        """Longest sequence the model takes, in tokens."""
        ropes = [self.rope] if self.windowed_rope is None else [self.rope, self.windowed_rope]
        limits = [rope.max_length for rope in ropes if rope.max_length is not None]
        return min([self.max_position_embeddings, *limits])
