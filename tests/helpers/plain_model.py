"""Llama and Qwen2 in numpy float64, from their papers' formulas: no cache, no batch, no JAX.

Takes a checkpoint by its Hugging Face names and layouts (matrices [out, in]). What both families share:
pre-norm blocks with RMSNorm (Zhang and Sennrich 2019), rotary positions on split halves (Su et al. 2021),
grouped-query attention (Ainslie et al. 2023) and SwiGLU (Shazeer 2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rollout_spec.models import ModelConfig

Float64Array = npt.NDArray[np.float64]


class PlainModel:
    """The forward pass of one set of weights. Results are remembered by sequence, so asking again is free."""

    def __init__(
        self, config: ModelConfig, weights: Iterable[tuple[str, npt.ArrayLike]], max_length: int
    ) -> None:
        if config.rope.kind != "default":
            raise ValueError(
                f"the plain model knows unscaled rotary positions only, not {config.rope.kind!r}"
            )
        self.config = config
        self.weights = {name: np.asarray(array, dtype=np.float64) for name, array in weights}
        self.eos_token_ids = config.eos_token_ids
        self.max_length = max_length
        self._last_logits: dict[tuple[int, ...], Float64Array] = {}

    def last_logits(self, token_ids: Sequence[int]) -> Float64Array:
        """Raw logits float64[V] after the whole sequence int[T]."""
        key = tuple(token_ids)
        if key not in self._last_logits:
            self._last_logits[key] = self._unembed(self._hidden_states(key)[-1])
        return self._last_logits[key]

    def logits(self, token_ids: Sequence[int]) -> Float64Array:
        """Raw logits float64[T, V] after every token of the sequence int[T]."""
        return self._unembed(self._hidden_states(token_ids))

    def _linear(self, x: Float64Array, name: str) -> Float64Array:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: Float64Array, name: str) -> Float64Array:
        mean_square = np.mean(x**2, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self.config.rms_norm_eps) * self.weights[f"{name}.weight"]

    def _rotate(self, x: Float64Array) -> Float64Array:
        """Rotary embedding of x float64[T, H, D] at positions 0..T-1."""
        half = x.shape[-1] // 2
        frequencies = self.config.rope.theta ** (-np.arange(half) / half)
        angles = np.arange(x.shape[0])[:, None, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _attention(self, x: Float64Array, name: str) -> Float64Array:
        """Causal grouped-query attention over x float64[T, E]."""
        config = self.config
        length = x.shape[0]
        q = self._rotate(self._linear(x, f"{name}.q_proj").reshape(length, config.num_heads, config.head_dim))
        k = self._rotate(
            self._linear(x, f"{name}.k_proj").reshape(length, config.num_kv_heads, config.head_dim)
        )
        v = self._linear(x, f"{name}.v_proj").reshape(length, config.num_kv_heads, config.head_dim)
        queries_per_key = config.num_heads // config.num_kv_heads
        k, v = (np.repeat(heads, queries_per_key, axis=1) for heads in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(config.head_dim)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
        return self._linear(mixed.reshape(length, -1), f"{name}.o_proj")

    def _feed_forward(self, x: Float64Array, name: str) -> Float64Array:
        gate = self._linear(x, f"{name}.gate_proj")
        return self._linear(
            gate / (1 + np.exp(-gate)) * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    def _hidden_states(self, token_ids: Sequence[int]) -> Float64Array:
        """float64[T, E] after the final norm."""
        x = self.weights["model.embed_tokens.weight"][list(token_ids)]
        for layer in range(self.config.num_layers):
            name = f"model.layers.{layer}"
            x = x + self._attention(self._norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
            x = x + self._feed_forward(self._norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        return self._norm(x, "model.norm")

    def _unembed(self, hidden: Float64Array) -> Float64Array:
        tied = self.config.tie_word_embeddings
        return hidden @ self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T
