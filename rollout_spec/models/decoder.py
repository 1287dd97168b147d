"""The decoder-only transformer that all families share: embedding, layers, final norm, head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from rollout_spec.models.config import ModelConfig
from rollout_spec.models.layers import Attend, DecoderLayer, Embedding, Linear, RMSNorm, matmul_precision
from rollout_spec.models.rope import rotary_table


class DecoderModel(nnx.Module):
    """A causal language model; a family that differs overrides the parts in which it does.

    Submodules carry the names of Hugging Face checkpoints, from which `rollout_spec.weights.names` derives
    the mapping of weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List([DecoderLayer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)

    def __call__(self, token_ids: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Logits of whole sequences, without a cache: for training and scoring; differentiable.

        token_ids int32[B, T]; positions int32[B, T] rotate queries and keys (default 0 .. T-1). Returns
        float32[B, T, V]. The mask goes by index: a token sees those before it in its row, so padding belongs
        at the right, where nothing reads it.
        """
        batch, length = token_ids.shape
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            rows = [heads.reshape(batch, length, *heads.shape[1:]) for heads in (q, k, v)]
            return causal_attention(*rows, scale=self.config.attention_scale).reshape(q.shape)

        hidden = self.hidden_states(token_ids.reshape(-1), positions.reshape(-1), attend)
        return self.unembed(hidden).reshape(batch, length, -1)

    def hidden_states(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Hidden states after the final norm, [T, E], of token_ids int32[T] at positions int32[T].

        `attend(layer, q [T, Hq, D], k [T, Hk, D], v [T, Hk, D]) -> [T, Hq, D]` gets rotated q and k, and
        decides what each token sees; it should scale scores by `config.attention_scale`. Which tokens belong
        together is its business alone: the rest of the network works on each token by itself.
        """
        table = rotary_table(positions, self.config.rope, self.config.head_dim)
        hidden = self.embed_tokens(token_ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, table, index, attend)
        return self.norm(hidden)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits float32[T, V] of hidden states [T, E]."""
        if self.lm_head is None:
            return self.embed_tokens.unembed(hidden)
        kernel = self.lm_head.kernel[...]
        return jnp.matmul(
            hidden, kernel, precision=matmul_precision(kernel.dtype), preferred_element_type=jnp.float32
        )


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float) -> jax.Array:
    """Softmax attention of each token over those up to itself.

    q [B, T, Hq, D], k and v [B, T, Hk, D] -> [B, T, Hq, D]; query head h reads key head h // (Hq / Hk).
    Scores and softmax are float32.
    """
    batch, length, query_heads, head_dim = q.shape
    precision = matmul_precision(q.dtype)
    grouped = q.reshape(batch, length, k.shape[2], -1, head_dim)
    scores = jnp.einsum(
        "bqhgd,bkhd->bhgqk", grouped, k, precision=precision, preferred_element_type=jnp.float32
    )
    visible = jnp.tril(jnp.ones((length, length), dtype=bool))
    weights = jax.nn.softmax(jnp.where(visible, scores * scale, -jnp.inf), axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, precision=precision)
    return mixed.reshape(batch, length, query_heads, head_dim)
