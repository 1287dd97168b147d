"""The decoder-only transformer that all families share: embedding, layers, final norm, head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from rollout_spec.models.config import ModelConfig, RopeConfig
from rollout_spec.models.layers import (
    Attend,
    DecoderLayer,
    Embedding,
    Linear,
    RotaryTable,
    hidden_norm,
    matmul_precision,
)
from rollout_spec.models.mtp import MultiTokenPredictor
from rollout_spec.models.rope import rotary_table


class DecoderModel(nnx.Module):
    """A causal language model; a family that differs overrides the parts in which it does.

    Submodules carry the names of Hugging Face checkpoints, from which `rollout_spec.weights.names` derives
    the mapping of weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List([self.new_layer(config, layer) for layer in range(config.num_layers)])
        self.norm = hidden_norm(config)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.mtp = None if config.mtp is None else MultiTokenPredictor(config, self.new_layer)

    def new_layer(self, config: ModelConfig, layer: int) -> DecoderLayer:
        """The residual block of that layer."""
        return DecoderLayer(config, layer)

    def __call__(self, token_ids: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Logits of whole sequences, without a cache: for training and scoring; differentiable.

        token_ids int32[B, T]; positions int32[B, T] rotate queries and keys (default 0 .. T-1). Returns
        float32[B, T, V]. The mask goes by index: a token sees those before it in its row, so padding belongs
        at the right, where nothing reads it.
        """
        batch, length = token_ids.shape
        positions, attend = self.whole(token_ids, positions)
        hidden = self.hidden_states(token_ids.reshape(-1), positions, attend)
        return self.unembed(hidden).reshape(batch, length, -1)

    def logits_ahead(
        self,
        token_ids: jax.Array,
        depths: int,
        positions: jax.Array | None = None,
        *,
        trunk_states: jax.Array | None = None,
    ) -> jax.Array:
        """The heads' logits of whole sequences, float32[depths, B, T, V], as `__call__` gives the trunk's.

        Entry [d, b, i] scores token i + d + 2 of row b. It reads tokens up to i + d + 1, so the last d + 1 of each
        row mean nothing. Needs `config.mtp`; there may be more depths than heads. trunk_states [B, T, E]: those
        of `whole_trunk_states`, where they are known already.
        """
        assert self.mtp is not None
        batch, length = token_ids.shape
        if trunk_states is None:
            trunk_states = self.whole_trunk_states(token_ids, positions)
        positions, attend = self.whole(token_ids, positions)
        table = self.rotary_table(positions, self.config.num_layers)
        hidden = self.mtp_input(trunk_states.reshape(batch * length, -1))
        logits = []
        for depth in range(depths):
            ahead = jnp.roll(token_ids, -(depth + 1), axis=1).reshape(-1)
            hidden, normed = self.mtp.predict(depth, self.embed(ahead), hidden, table, attend)
            logits.append(self.unembed(normed).reshape(batch, length, -1))
        return jnp.stack(logits)

    def whole_trunk_states(self, token_ids: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """`trunk_states` of whole sequences without a cache, [B, T, E] of token_ids int32[B, T]."""
        batch, length = token_ids.shape
        positions, attend = self.whole(token_ids, positions)
        return self.trunk_states(token_ids.reshape(-1), positions, attend).reshape(batch, length, -1)

    def mtp_input(self, trunk_states: jax.Array) -> jax.Array:
        """What the first head takes, [T, E], of `trunk_states` [T, E]."""
        assert self.mtp is not None
        return self.norm(trunk_states) if self.mtp.form.reads_normed else trunk_states

    def whole(self, token_ids: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, Attend]:
        """Positions int32[B * T] and attention of whole sequences int32[B, T]."""
        batch, length = token_ids.shape
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            rows = [heads.reshape(batch, length, *heads.shape[1:]) for heads in (q, k, v)]
            return causal_attention(
                *rows,
                scale=self.config.attention_scale,
                sliding_window=self.config.window(layer),
                soft_cap=self.config.attention_soft_cap,
            ).reshape(*q.shape[:-1], -1)

        return positions.reshape(-1), attend

    def hidden_states(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Hidden states after the final norm, [T, E]: the norm of `trunk_states`."""
        return self.norm(self.trunk_states(token_ids, positions, attend))

    def trunk_states(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Hidden states before the final norm, [T, E], of token_ids int32[T] at positions int32[T].

        `attend(layer, q [T, Hq, D], k [T, Hk, D], v [T, Hk, D]) -> [T, Hq, D]` gets rotated q and k, and
        decides what each token sees; it should scale scores by `config.attention_scale`, and heed
        `config.window(layer)` and `config.attention_soft_cap`. Which tokens belong together is its business
        alone: the rest of the network works on each token by itself.
        """
        tables: dict[RopeConfig, RotaryTable] = {}
        hidden = self.embed(token_ids)
        for index, layer in enumerate(self.layers):
            rope = self.config.rope_of(index)
            if rope not in tables:
                tables[rope] = self.rotary_table(positions, index)
            hidden = layer(hidden, tables[rope], index, attend)
        return hidden

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """[T, E] of token_ids int32[T]."""
        embedded = self.embed_tokens(token_ids)
        if self.config.scaled_embedding:
            embedded = embedded * jnp.asarray(self.config.hidden_size**0.5, embedded.dtype)
        return embedded

    def rotary_table(self, positions: jax.Array, layer: int) -> RotaryTable:
        """What rotates queries and keys of that layer, or head, at positions int32[T]."""
        return rotary_table(positions, self.config.rope_of(layer), self.config.rotary_dim)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits float32[T, V] of hidden states [T, E]."""
        if self.lm_head is None:
            logits = self.embed_tokens.unembed(hidden)
        else:
            kernel = self.lm_head.kernel[...]
            logits = jnp.matmul(
                hidden, kernel, precision=matmul_precision(kernel.dtype), preferred_element_type=jnp.float32
            )
        return soft_capped(logits, self.config.logit_soft_cap)


def soft_capped(scores: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(scores / cap); the scores themselves if there is no cap."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Softmax attention of each token over those up to itself.

    q [B, T, Hq, D], k [B, T, Hk, D], v [B, T, Hk, Dv] -> [B, T, Hq, Dv]; query head h reads key head
    h // (Hq / Hk). Scores and softmax are float32. sliding_window: positions that a token sees, itself included.
    """
    batch, length, query_heads, head_dim = q.shape
    precision = matmul_precision(q.dtype)
    grouped = q.reshape(batch, length, k.shape[2], -1, head_dim)
    scores = jnp.einsum(
        "bqhgd,bkhd->bhgqk", grouped, k, precision=precision, preferred_element_type=jnp.float32
    )
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    visible = (distance >= 0) & (distance < (length if sliding_window is None else sliding_window))
    scores = soft_capped(scores * scale, soft_cap)
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, precision=precision)
    return mixed.reshape(batch, length, query_heads, v.shape[-1])
