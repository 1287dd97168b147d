"""The families in numpy float64, from their papers' formulas: no cache, no batch, no JAX.

Takes a checkpoint by its Hugging Face names and layouts (matrices [out, in]). What all families share:
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

    def _norm(self, x: Float64Array, name: str, epsilon: float | None = None) -> Float64Array:
        mean_square = np.mean(x**2, axis=-1, keepdims=True)
        epsilon = self.config.rms_norm_eps if epsilon is None else epsilon
        offset = 1.0 if self.config.norm_offset else 0.0
        return x / np.sqrt(mean_square + epsilon) * (offset + self.weights[f"{name}.weight"])

    def _theta(self, layer: int) -> float:
        """Base of the rotary embedding of that layer."""
        windowed = self.config.windowed_rope
        return self.config.rope.theta if windowed is None or not self._window(layer) else windowed.theta

    def _window(self, layer: int) -> int | None:
        return self.config.windows[layer] if self.config.windows else None

    def _rotate(self, x: Float64Array, theta: float) -> Float64Array:
        """Rotary embedding of x float64[T, H, D] at positions 0..T-1."""
        half = x.shape[-1] // 2
        frequencies = theta ** (-np.arange(half) / half)
        angles = np.arange(x.shape[0])[:, None, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _attention(self, x: Float64Array, layer: int, name: str) -> Float64Array:
        """Causal grouped-query attention over x float64[T, E], with the weights below `name`."""
        config = self.config
        length = x.shape[0]
        q = self._linear(x, f"{name}.q_proj").reshape(length, config.num_heads, config.head_dim)
        k = self._linear(x, f"{name}.k_proj").reshape(length, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = self._rotate(q, self._theta(layer)), self._rotate(k, self._theta(layer))
        v = self._linear(x, f"{name}.v_proj").reshape(length, config.num_kv_heads, config.head_dim)
        queries_per_key = config.num_heads // config.num_kv_heads
        k, v = (np.repeat(heads, queries_per_key, axis=1) for heads in (k, v))
        mixed = self._mix(np.einsum("qhd,khd->hqk", q, k) * config.attention_scale, v, self._window(layer))
        return self._linear(mixed.reshape(length, -1), f"{name}.o_proj")

    def _latent_attention(self, x: Float64Array, layer: int, name: str) -> Float64Array:
        """DeepSeek-V2's equations 9 to 19, keys and values expanded for every token."""
        config, latent = self.config, self.config.latent
        assert latent is not None
        length, heads, theta = x.shape[0], config.num_heads, config.rope.theta
        if latent.query_rank is None:
            q = self._linear(x, f"{name}.q_proj")
        else:
            compressed = self._norm(self._linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", 1e-6)
            q = self._linear(compressed, f"{name}.q_b_proj")
        q = q.reshape(length, heads, -1)
        cached = self._linear(x, f"{name}.kv_a_proj_with_mqa")
        key = cached[:, None, latent.kv_rank :]
        expanded = self._norm(cached[:, : latent.kv_rank], f"{name}.kv_a_layernorm", 1e-6)
        expanded = self._linear(expanded, f"{name}.kv_b_proj").reshape(length, heads, -1)

        def rotated(z: Float64Array) -> Float64Array:
            pairs = [z[..., 0::2], z[..., 1::2]] if latent.interleaved else [z]
            return self._rotate(np.concatenate(pairs, axis=-1), theta)

        scores = np.einsum("qhd,khd->hqk", q[..., : latent.nope_dim], expanded[..., : latent.nope_dim])
        scores += np.einsum("qhd,kd->hqk", rotated(q[..., latent.nope_dim :]), rotated(key)[:, 0])
        mixed = self._mix(scores * config.attention_scale, expanded[..., latent.nope_dim :], None)
        return self._linear(mixed.reshape(length, -1), f"{name}.o_proj")

    def _mix(self, scores: Float64Array, v: Float64Array, window: int | None) -> Float64Array:
        """Values float64[T, H, D] weighed by the causal softmax of scores float64[H, T, T]."""
        length = v.shape[0]
        scores = _capped(scores, self.config.attention_soft_cap)
        distance = np.arange(length)[:, None] - np.arange(length)[None, :]
        visible = (distance >= 0) & (distance < (window or length))
        scores = np.where(visible, scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)

    def _feed_forward(self, x: Float64Array, name: str) -> Float64Array:
        gate = self._linear(x, f"{name}.gate_proj")
        return self._linear(self._activation(gate) * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def _mlp(self, x: Float64Array, layer: int, name: str) -> Float64Array:
        experts = self.config.experts
        if experts is None or layer not in experts.layers:
            return self._feed_forward(x, name)
        mixed = np.stack([self._routed(token, name) for token in x])
        if experts.shared_intermediate_size:
            mixed = mixed + self._feed_forward(x, f"{name}.shared_experts")
        return mixed

    def _routed(self, x: Float64Array, name: str) -> Float64Array:
        """One token float64[E] through the experts that it chooses."""
        experts = self.config.experts
        assert experts is not None
        logits = self.weights[f"{name}.gate.weight"] @ x
        if experts.scoring == "softmax":
            scores = np.exp(logits - logits.max())
            scores = scores / scores.sum()
        else:
            scores = 1 / (1 + np.exp(-logits))
        ranked = scores + self.weights.get(f"{name}.gate.e_score_correction_bias", 0.0)
        groups = np.sort(ranked.reshape(experts.num_groups, -1), axis=1)[:, -experts.group_score_of :]
        kept = np.argsort(-groups.sum(axis=1))[: experts.chosen_groups]
        size = experts.num_experts // experts.num_groups
        allowed = [expert for expert in range(experts.num_experts) if expert // size in kept]
        chosen = sorted(allowed, key=lambda expert: -ranked[expert])[: experts.num_chosen]
        weights = scores[chosen] / (scores[chosen].sum() if experts.normalised else 1.0) * experts.scale
        outputs = [self._feed_forward(x, f"{name}.experts.{expert}") for expert in chosen]
        return weights @ np.array(outputs)

    def _activation(self, x: Float64Array) -> Float64Array:
        if self.config.activation == "silu":
            return x / (1 + np.exp(-x))
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def _hidden_states(self, token_ids: Sequence[int]) -> Float64Array:
        """float64[T, E] after the final norm."""
        return self._norm(self._trunk(token_ids), "model.norm")

    def _embed(self, token_ids: Sequence[int]) -> Float64Array:
        x = self.weights["model.embed_tokens.weight"][list(token_ids)]
        return x * np.float32(self.config.hidden_size**0.5) if self.config.scaled_embedding else x

    def _trunk(self, token_ids: Sequence[int]) -> Float64Array:
        """float64[T, E] before the final norm."""
        x = self._embed(token_ids)
        for layer in range(self.config.num_layers):
            x = self._block(x, layer, f"model.layers.{layer}")
        return x

    def _block(self, x: Float64Array, layer: int, name: str) -> Float64Array:
        """One residual block as that layer's, with the weights below `name`."""
        attention = self._attention if self.config.latent is None else self._latent_attention
        attended = attention(self._norm(x, f"{name}.input_layernorm"), layer, f"{name}.self_attn")
        if self.config.output_norms:
            x = x + self._norm(attended, f"{name}.post_attention_layernorm")
            fed = self._mlp(self._norm(x, f"{name}.pre_feedforward_layernorm"), layer, f"{name}.mlp")
            return x + self._norm(fed, f"{name}.post_feedforward_layernorm")
        x = x + attended
        return x + self._mlp(self._norm(x, f"{name}.post_attention_layernorm"), layer, f"{name}.mlp")

    def _unembed(self, hidden: Float64Array) -> Float64Array:
        tied = self.config.tie_word_embeddings
        logits = hidden @ self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T
        return _capped(logits, self.config.logit_soft_cap)


def _capped(scores: Float64Array, cap: float | None) -> Float64Array:
    return scores if cap is None else cap * np.tanh(scores / cap)
